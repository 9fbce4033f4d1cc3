"""specsim demo: speculation on the shipped pair, round by round."""

import click

DEMO_PROMPTS = 6


def demo() -> None:
    """Watch speculative decoding round by round (under a minute).

    Exit status: 0 if the output equals that of plain decoding, 1 if it does not.

    Example:
      specsim demo
    """
    from specsim.cli.walkthrough import run
    from specsim.core.display import stdout_console
    from specsim.models.load import load
    from specsim.models.shipped import load_prompts

    texts = [prompt["text"] for prompt in load_prompts()[:DEMO_PROMPTS]]
    if not run(load(), texts, stdout_console()):
        raise click.exceptions.Exit(1)
