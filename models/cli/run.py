"""`run`: prompts from the command line or a file, continued, as streamed text or one JSON document."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from l1_kernels.errors import UserError
from l2_dense_parallel.world import World
from models.cli.inputs import Prompt, prompts_from
from models.cli.options import OUTPUT, EngineOptions, flag
from models.cli.output import json_line

if TYPE_CHECKING:
    from models.cli.open_model import OpenModel
    from models.generate import GenerateOptions, Result, Timing

INPUT, CHOICE = "Input", "Choice of tokens"
DEFAULT_NEW_TOKENS = 128
DEFAULT_PROMPTS = {"shakespeare": "KING RICHARD:\n", "shakespeare_moe": "KING RICHARD:\n"}
DEFAULT_PROMPT, DEFAULT_MESSAGE = "Once upon a time", "Who are you, and what can you do?"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What to continue, how tokens are chosen, and how the outcome is shown."""

    prompt: Annotated[list[str] | None, flag("--prompt", "-p", panel=INPUT, metavar="TEXT", text="a prompt; may be repeated")] = None
    prompts: Annotated[str | None, flag("--prompts", panel=INPUT, metavar="FILE.jsonl", text='{"prompt": TEXT} a line')] = None
    ids: Annotated[str | None, flag("--ids", panel=INPUT, metavar="FILE.jsonl", text="token ids, [1, 2, 3] a line")] = None
    chat: Annotated[bool, flag("--chat", panel=INPUT, text="put each prompt into the model's chat template")] = False

    max_new_tokens: Annotated[
        int | None, flag("--max-new-tokens", "-n", panel=CHOICE, metavar="N", text=f"(default: {DEFAULT_NEW_TOKENS}, or what the model's positions leave)")
    ] = None
    temperature: Annotated[float, flag("--temperature", panel=CHOICE, metavar="F", text="0: always the likeliest token")] = 0.0
    top_k: Annotated[int, flag("--top-k", panel=CHOICE, metavar="N", text="only the N likeliest; 0: all")] = 0
    top_p: Annotated[float, flag("--top-p", panel=CHOICE, metavar="F", text="only the likeliest that reach F together; 1: all")] = 1.0
    repetition_penalty: Annotated[float, flag("--repetition-penalty", panel=CHOICE, metavar="F", text="above 1: fewer repeats")] = 1.0
    seed: Annotated[int, flag("--seed", panel=CHOICE, metavar="N", text="the same seed gives the same tokens")] = 0
    stop: Annotated[list[str] | None, flag("--stop", panel=CHOICE, metavar="TEXT", text="end before this text; may be repeated")] = None
    stop_id: Annotated[list[int] | None, flag("--stop-id", panel=CHOICE, metavar="N", text="end at this token; may be repeated")] = None
    ignore_eos: Annotated[bool, flag("--ignore-eos", panel=CHOICE, text="go on past the model's end tokens")] = False

    batch_size: Annotated[int, flag("--batch-size", panel="Speed", metavar="N", text="prompts side by side in a data-parallel group")] = 8
    stream: Annotated[bool, flag("--stream/--no-stream", panel=OUTPUT, text="show text as it comes (with one prompt)")] = True
    json: Annotated[bool, flag("--json", panel=OUTPUT, text="one JSON document and nothing else")] = False


def run(world: World, engine: EngineOptions, options: RunOptions) -> None:
    """Continue prompts with a model."""
    prompts = prompts_from(options.prompt or [], options.prompts, options.ids)
    generation = generation_options(options)  # refused before anything is loaded
    from models.cli.cache_home import settle
    from models.cli.open_model import open_model
    from models.generate import Timing, cache_size

    opened = open_model(world, engine, quiet=options.json, seen={"run": options, "prompts": prompts})
    if opened is None:
        return
    prompts = prompts or [default_prompt(engine.model, options.chat, opened)]
    prompt_ids = [encode(opened, prompt, options.chat) for prompt in prompts]
    generation = replace(generation, max_new_tokens=new_tokens(opened, options, prompt_ids), check_nan=engine.check_nan, **end_ids(opened, options))
    check(opened, prompts, prompt_ids, generation)
    opened.load()

    streaming = options.stream and not options.json and len(prompts) == 1
    mine = opened.mesh.my_share(len(prompts))
    if streaming and opened.speaks:
        show("" if options.chat or prompts[0].text is None else prompts[0].text)
    my_ids = [prompt_ids[i] for i in mine]
    generation = settle(opened, my_ids, generation, engine.kv)
    results = opened.generate(
        my_ids, generation, on_text=(lambda _, text: show(text)) if streaming and opened.speaks else None, indices=list(mine),
        decoder=opened.decoder(cache_size(my_ids, generation), None if generation.check_nan else generation.sampling),
    )  # fmt: skip
    opened.say_drops()
    parts = opened.between_groups.gather(results)
    if parts is not None and opened.speaks:
        results = sorted((result for part in parts for result in part), key=lambda result: result.index)
        report(opened, engine, options, prompts, results, Timing.of(results), streaming)


def generation_options(options: RunOptions) -> GenerateOptions:
    from models.generate import GenerateOptions
    from models.sampling import Sampling

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.repetition_penalty, options.seed)
    limit = DEFAULT_NEW_TOKENS if options.max_new_tokens is None else options.max_new_tokens
    if any(text == "" for text in options.stop or []):
        raise UserError("--stop: an empty text would stop at once; give one that is not empty")
    return GenerateOptions(limit, sampling, tuple(options.stop or ()), batch_size=options.batch_size)


def default_prompt(model: str, chat: bool, opened: OpenModel) -> Prompt:
    if opened.tokenizer is None:
        raise UserError(f"--model {model} has no tokenizer: give token ids with --ids FILE.jsonl")
    return Prompt("the default prompt", DEFAULT_MESSAGE if chat else DEFAULT_PROMPTS.get(model, DEFAULT_PROMPT))


def encode(opened: OpenModel, prompt: Prompt, chat: bool) -> list[int]:
    if prompt.ids is not None:
        if chat:
            raise UserError("--chat: needs text (--prompt or --prompts), not --ids")
        return prompt.ids
    assert prompt.text is not None
    if opened.tokenizer is None:
        raise UserError(f"{prompt.name}: --model {opened.name} has no tokenizer; give token ids with --ids FILE.jsonl")
    if not prompt.text:
        raise UserError(f"{prompt.name}: is empty; give at least one character")
    try:
        if chat:
            from models.chat import chat_prompt

            return opened.tokenizer.encode(chat_prompt(opened.tokenizer, prompt.text))
        return opened.tokenizer.encode(prompt.text, special_tokens=True)
    except UserError as error:
        raise UserError(f"{prompt.name}: {error}") from None


def new_tokens(opened: OpenModel, options: RunOptions, prompt_ids: list[list[int]]) -> int:
    """--max-new-tokens; not given, the default, or as many as the longest prompt leaves room for (at least one)."""
    from models.generate import context_limit

    if options.max_new_tokens is not None:
        return options.max_new_tokens
    return max(1, min(DEFAULT_NEW_TOKENS, context_limit(opened.config) - max(map(len, prompt_ids))))


def end_ids(opened: OpenModel, options: RunOptions) -> dict[str, Any]:
    eos = () if options.ignore_eos else opened.eos_ids(options.chat)
    for token in options.stop_id or ():
        if not 0 <= token < opened.config.vocab_size:
            raise UserError(f"--stop-id {token} is outside the vocabulary of {opened.config.vocab_size}")
    if options.stop and opened.tokenizer is None:
        raise UserError(f"--stop: --model {opened.name} has no tokenizer, so there is no text; use --stop-id")
    return {"eos_ids": eos, "stop_ids": tuple(options.stop_id or ())}


def check(opened: OpenModel, prompts: list[Prompt], prompt_ids: list[list[int]], generation: GenerateOptions) -> None:
    from models.generate import check_prompts

    check_prompts(opened.config, prompt_ids, generation.max_new_tokens, [prompt.name for prompt in prompts])


def show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def report(
    opened: OpenModel, engine: EngineOptions, options: RunOptions, prompts: list[Prompt], results: list[Result], timing: Timing, streamed: bool
) -> None:
    """Rank 0's last words: the JSON document, or what was not streamed, and the line of times."""
    if options.json:
        show(json_line(document(opened, engine, prompts, results, timing)))
        return
    if streamed:
        if opened.tokenizer is None:
            show(json.dumps(results[0].token_ids))
        show("\n\n")
    else:
        for prompt, result in zip(prompts, results, strict=True):
            head = f"[{prompt.name}]\n" if len(prompts) > 1 else ""
            body = json.dumps(result.token_ids) if opened.tokenizer is None else ("" if options.chat else prompt.text or "") + result.text
            show(f"{head}{body}\n\n")
    tokens = sum(len(result.token_ids) for result in results)
    show(f"{tokens} tokens: time to first token {timing.first_token_ms:.0f} ms, {timing.token_ms:.2f} ms/token, {timing.tokens_per_s:.1f} tokens/s\n")


def document(opened: OpenModel, engine: EngineOptions, prompts: list[Prompt], results: list[Result], timing: Timing) -> dict[str, Any]:
    """What `run --json` prints; other tools depend on its keys."""

    def one(prompt: Prompt, result: Result) -> dict[str, Any]:
        text = prompt.text
        if text is None and opened.tokenizer is not None:
            text = opened.tokenizer.decode(result.prompt_ids)
        return {
            "prompt": text,
            "prompt_ids": result.prompt_ids,
            "token_ids": result.token_ids,
            "text": result.text,
            "finish_reason": result.finish_reason,
        }

    return {
        "model": engine.model,
        "device": opened.device.name,
        "dtype": opened.dtype,
        "mesh": opened.mesh.describe(),
        "results": [one(prompt, result) for prompt, result in zip(prompts, results, strict=True)],
        "timing": {
            "load_s": round(opened.load_s, 3),
            "first_token_ms": round(timing.first_token_ms, 3),
            "token_ms": round(timing.token_ms, 4),
            "tokens_per_s": round(timing.tokens_per_s, 2),
        },
    }
