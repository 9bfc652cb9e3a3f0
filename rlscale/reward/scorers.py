"""Scorers by name: the built-in ones, which data source uses which, and the user's own as `module:function`.

A *spec* is what names a scorer: a built-in name (`last_number`), the default scorer of a data source
(`source:openai/gsm8k`, which is what prompts out of files carry), or the user's `module:function` or
`path/to/file.py:function`. Light to import: the trainer and every scorer process do.
"""

from __future__ import annotations

from rlscale.config import functions

SCORERS = {
    "last_number": "rlscale.reward.verifiers:last_number",
    "gsm8k": "rlscale.reward.verifiers:gsm8k",
    "exact_match": "rlscale.reward.verifiers:exact_match",
    "math": "rlscale.reward.math_answer:math",
    "reasoning_gym": "rlscale.reward.gym_answer:score",
}
SOURCES = {
    "addition": "last_number",
    "openai/gsm8k": "math",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "HuggingFaceH4/aime_2024": "math",
    "math_dapo": "math",
    "aime_2024": "math",
}


def expand(spec: str) -> str:
    """The `module:function` behind a spec; file paths become absolute.

    Raises:
        ValueError: no such built-in scorer, no default one for that data source, no such file, or not of the form
            `module:function`.
    """
    if spec.startswith("source:"):
        source = spec.removeprefix("source:")
        if source not in SOURCES:
            raise ValueError(
                f"reward.scorer: the data source {source!r} has no default; set reward.scorer to module:function, "
                f"path/file.py:function or one of {', '.join(SCORERS)} (known sources: {', '.join(SOURCES)})"
            )
        spec = SOURCES[source]
    if spec in SCORERS:
        return SCORERS[spec]
    if problem := functions.problem("reward.scorer", spec):
        raise ValueError(f"{problem} (built-in scorers: {', '.join(SCORERS)})")
    return functions.absolute(spec)
