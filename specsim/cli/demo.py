"""specsim demo: speculation on the shipped pair, round by round."""

import typer

DEMO_PROMPTS = 6


def demo() -> None:
    """Watch speculation on the shipped pair (under a minute)."""
    from specsim.cli.walkthrough import run
    from specsim.core.display import stdout_console
    from specsim.models.load import load
    from specsim.models.shipped import load_prompts

    texts = [prompt["text"] for prompt in load_prompts()[:DEMO_PROMPTS]]
    if not run(load(), texts, stdout_console()):
        raise typer.Exit(1)
