"""A user's message in the form that a chat model was trained on: its own Jinja template, or plain ChatML."""

from __future__ import annotations

from l1_kernels.errors import UserError
from models.tokenizer import Tokenizer

CHATML_BEGIN, CHATML_END = "<|im_start|>", "<|im_end|>"


def chat_prompt(tokenizer: Tokenizer, message: str) -> str:
    """The text to encode (without further special tokens) for one user message, up to where the answer begins.

    The model's template decides, a default system message included. A model without one gets ChatML if its vocabulary
    has ChatML's two tokens; otherwise UserError.
    """
    if tokenizer.chat_template is not None:
        return _render(tokenizer, [{"role": "user", "content": message}])
    if tokenizer.token_id(CHATML_BEGIN) is None or tokenizer.token_id(CHATML_END) is None:
        raise UserError(f"--chat: {tokenizer.source} has no chat template and no ChatML tokens; this is not a chat model")
    return f"{CHATML_BEGIN}user\n{message}{CHATML_END}\n{CHATML_BEGIN}assistant\n"


def chat_end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """ChatML's end of a turn, where the vocabulary has it: an answer ends there even if the config names another token."""
    end = tokenizer.token_id(CHATML_END)
    return () if end is None else (end,)


def _render(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    """The template comes with the checkpoint, so it runs in Jinja's sandbox, which has no way out of it."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(why: str) -> None:
        raise TemplateError(why)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    assert tokenizer.chat_template is not None
    try:
        template = environment.from_string(tokenizer.chat_template)
        return template.render(messages=messages, add_generation_prompt=True, raise_exception=refuse, **tokenizer.special_names)
    except Exception as error:  # a template is a program: it may fail in any way
        raise UserError(f"--chat: the chat template of {tokenizer.source} fails ({' '.join(str(error).split())[:200]})") from None
