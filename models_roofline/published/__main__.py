"""Prints the tables of docs/prediction.md: `python -m models_roofline.published`."""

from models_roofline import methods
from models_roofline.published import specdecode_bench, speed_bench


def markdown() -> str:
    """Methods, SPEED-Bench and SpecDecode-Bench, in the order of the page."""
    return "\n\n".join(
        [
            "## Methods",
            methods.markdown(),
            "## SPEED-Bench's step ratios",
            speed_bench.markdown().strip(),
            "## SpecDecode-Bench's step costs",
            specdecode_bench.markdown(),
        ]
    )


if __name__ == "__main__":
    print(markdown())
