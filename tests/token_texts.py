"""Texts that tokenizers disagree on: every prompt of the bundled splits, hard cases by hand, and seeded noise."""

from __future__ import annotations

import random
from functools import cache

from workloads import load_split

HARD = (
    "", "\n", " ", "  ", "\t\t x", "a  b   c    d\n\n\n e \r\n\r\n f", "trailing   ", " \n \n",
    "I'm we'll THEY'RE don't", "ABC'S abc'D", "'ll  'LL", "1234567890 12 3,141.59", "$+<=>^~|`",
    "naïve café Ünïcödé ﬁ", "e\u0301 combining", "½ ² ① Ⅷ ৪", "𝒳𝓎 𐍈",
    "中文测试，你好。日本語のテキスト、カタカナ", "한국어 문장입니다", "العربية نص", "हिन्दी पाठ",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 🇩🇪", "x\u200b\u200dy", "\ufeffbom", "\x00nul\x01", "\ud7ff\ue000",
    "\u00a0nbsp\u2003em\u3000ideo\u0085nel\u2028ls",
    "<|im_start|>user\nhi<|im_end|>", "<|im_start|", "a<|im_end|> b", "<repo_name> <file_sep>x",
    "def f(x):\n    return x**2  # ok\n\tif True:\n",
)  # fmt: skip
"""Spaces and line ends, contractions, digits, scripts without spaces, joiners, controls, names of special tokens."""

_NOISE = list(
    "  \n\t\r'sStTdDlLmMrReEvVaAbBzZ019.,!?-_+<>=|^~$`#@()[]{}\"\\/éßñ中日あ한ع🙂👍\u00a0\u200d\u0301½²Ⅷ"
)


@cache
def texts() -> tuple[str, ...]:
    """Every text once made, the same on every machine."""
    prompts = [
        turn
        for name in ("qualitative", "demo", "warmup")
        for p in load_split(name).prompts
        for turn in p.turns
    ]
    rng = random.Random(3)
    noise = ["".join(rng.choices(_NOISE, k=rng.randint(1, 60))) for _ in range(400)]
    return (*prompts, *HARD, *noise)
