"""`python -m models.bert` and the console script `strata-bert`: encoders (BERT, DistilBERT, RoBERTa). As models/gpt.py."""

from __future__ import annotations

import sys
from typing import NoReturn

from l2_dense_parallel.faults import run
from models.gpt import command_line


def main() -> NoReturn:
    """Run the command that sys.argv names (embed, fill-mask), and end the process with its status."""
    run(lambda world: command_line(world, sys.argv[1:], "strata-bert"))


if __name__ == "__main__":
    main()
