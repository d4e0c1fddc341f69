"""Prompt files as people have them: formats, encodings, damaged rows, and a sentence for each refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workloads import Split, WorkloadError, load_file
from workloads.loaders import FORMATS
from workloads.loaders.rows import MAX_LINE_BYTES
from workloads.prompt import MAX_PROMPT_CHARS

DATA = Path(__file__).parent / "data" / "datasets"


def load_bytes(folder: Path, data: bytes, name: str = "prompts.jsonl") -> Split:
    path = folder / name
    path.write_bytes(data)
    return load_file(path)


def load_rows(folder: Path, *rows: Any) -> Split:
    return load_bytes(folder, "".join(json.dumps(row) + "\n" for row in rows).encode())


def refusal(folder: Path, row: Any) -> str:
    """The reason why a row is rejected, beside a good row that is taken."""
    split = load_rows(folder, {"prompt": "fine"}, row)
    assert [p.turns for p in split.prompts] == [("fine",)]
    assert [r.line for r in split.rejected] == [2]
    return split.rejected[0].reason


# --- containers and encodings -----------------------------------------------------------------------------


def test_byte_order_mark_is_no_part_of_the_first_row() -> None:
    split = load_file(DATA / "bom.jsonl")
    assert [p.turns[0] for p in split.prompts] == ["What is 2+2?", "What is 3+3?"]
    assert [p.expected_tokens for p in split.prompts] == [16, 16]
    assert split.rejected == ()


def test_crlf_blank_and_trailing_lines(tmp_path: Path) -> None:
    data = b'\r\n{"prompt": "a"}\r\n\r\n   \r\n{"prompt": "b"}\r\n{"prompt": 7}\r\n\r\n\r\n'
    split = load_bytes(tmp_path, data, "crlf_blank_trailing.jsonl")
    assert [p.turns[0] for p in split.prompts] == ["a", "b"]
    assert [r.line for r in split.rejected] == [6]


def test_unicode_line_separators_do_not_end_a_line(tmp_path: Path) -> None:
    split = load_bytes(tmp_path, '{"prompt": "one\u2028two\u0085three"}\n{"prompt": "b"}'.encode())
    assert split.prompts[0].turns == ("one\u2028two\u0085three",)
    assert len(split.prompts) == 2


def test_json_list_and_one_indented_object(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"question": "b"}]
    listed = load_bytes(tmp_path, b" \n" + json.dumps(rows, indent=2).encode(), "rows.json")
    assert [p.turns[0] for p in listed.prompts] == ["a", "b"]
    single = load_bytes(tmp_path, json.dumps({"prompt": "only"}, indent=2).encode(), "one.json")
    assert [p.turns[0] for p in single.prompts] == ["only"]


def test_content_decides_not_the_extension(tmp_path: Path) -> None:
    assert len(load_bytes(tmp_path, b'{"prompt": "a"}\n{"prompt": "b"}\n', "prompts.json").prompts) == 2
    assert len(load_bytes(tmp_path, b'[{"prompt": "a"}]', "prompts.txt").prompts) == 1


def test_same_rows_hash_the_same_in_any_container_and_place(tmp_path: Path) -> None:
    rows = [{"id": "1", "prompt": "Grüße 😀"}, {"id": "2", "turns": ["a", "b"]}]
    lines = load_rows(tmp_path, *rows)
    raw = load_bytes(tmp_path, json.dumps(rows, ensure_ascii=False).encode(), "other.json")
    assert lines.sha256 == raw.sha256
    assert load_rows(tmp_path, *reversed(rows)).sha256 != lines.sha256


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf\r\n\n", "is empty"),
        (b"[]", "empty list"),
        (b"PAR1\x15\x04\x15", "binary file"),
        (b'{"prompt": "a"}\x00\x01', "binary file"),
        ('{"prompt": "a"}'.encode("utf-16"), "UTF-16"),
        (b'[{"prompt": "a"},', "starts like a JSON list but is not one"),
        (b'[{"prompt": "\xff"}]', "not UTF-8"),
        (b"[" * 200_000, "nested too deeply"),
        (b"id,prompt\n1,hello\n2,there\n", "no row can be used (3 refused; line 1: not JSON"),
        (b'{"foo": 1}\n', "no row can be used (1 refused; line 1: the row has no text"),
    ],
)
def test_unusable_file_is_one_sentence(tmp_path: Path, data: bytes, says: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        load_bytes(tmp_path, data)
    message = str(caught.value)
    assert says in message
    assert "\n" not in message
    assert message.startswith(str(tmp_path / "prompts.jsonl"))


def test_directory_missing_file_and_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="is a directory"):
        load_file(tmp_path)
    with pytest.raises(WorkloadError, match="No such file"):
        load_file(tmp_path / "absent.jsonl")
    with pytest.raises(
        WorkloadError, match=r"^format: 'csv' is not known; use one of jsonl, sharegpt, spec_bench"
    ):
        load_file(DATA / "bom.jsonl", "csv")


# --- rows -------------------------------------------------------------------------------------------------


def test_every_bad_row_is_reported_with_its_line(tmp_path: Path) -> None:
    lines = [
        b'{"prompt": "What is 2+2?", "output_tokens": 16}',
        b"not json at all",
        b'{"prompt": "cut off',
        b'["a", "list"]',
        b'"a string"',
        b"null",
        b'{"output_tokens": 16}',
        b'{"prompt": ""}',
        b'{"prompt": 42}',
        b'{"prompt": "half \\ud83d of a pair"}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "dup"}',
        b'{"prompt": "dup"}',
    ]
    split = load_bytes(tmp_path, b"\n".join(lines), "bad_rows.jsonl")
    assert [p.turns[0] for p in split.prompts] == ["What is 2+2?", "dup", "dup"]
    assert [r.line for r in split.rejected] == list(range(2, 12))
    assert [(d.id, d.same_as) for d in split.duplicates] == [("row-13", "row-12")]
    summary = split.summary()
    assert (summary["prompts"], summary["rejected"], summary["duplicates"]) == (3, 10, 1)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": " \n"}, "`turns[0]` is empty"),
        ({"turns": []}, "`turns` is empty"),
        ({"turns": ["a", ""]}, "`turns[1]` is empty"),
        ({"turns": ["a", None]}, "`turns[1]` is null; it must be a string"),
        ({"prompt": {"a": 1}}, "`prompt` is an object"),
        ({"prompt": "a", "output_tokens": "16"}, "`output_tokens` is a string"),
        ({"prompt": "a", "output_tokens": True}, "`output_tokens` is true or false"),
        ({"prompt": "a", "output_tokens": 1.5}, "`output_tokens` is a number; it must be a whole number"),
        ({"prompt": "a", "output_tokens": 0}, "the expected length is 0 tokens"),
        ({"prompt": "a", "id": 1.5}, "`id` is a number; it must be a string or a whole number"),
        ({"prompt": "a", "category": ["x"]}, "`category` is a list"),
        ({"prompt": "a", "system": "\udc00"}, "`system` holds half of a surrogate pair"),
        ({"prompt": "a", "history": ["x", "y"]}, "`history` has more answers than there are turns"),
        ({"prompt": "a", "id": "row-1"}, "the id 'row-1' is taken by line 1"),
        ({"messages": [{"role": "system", "content": "s"}], "system": "s"}, "has no human turn"),
        ({"messages": [{"role": "user", "content": "a"}], "category": 3}, "`category` is a number"),
        ({"messages": "hello"}, "`messages` is a string; it must be a list of messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "is from 'tool'; known are human, user"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "content that is not text",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "late"}]},
            "system message after the first human turn",
        ),
        ({"prompt": "x" * (MAX_PROMPT_CHARS + 1)}, "the prompt is too long: 262,145 characters"),
    ],
)
def test_reason_names_the_field(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    assert says in refusal(tmp_path, row)


def test_huge_line_is_refused_without_decoding(tmp_path: Path) -> None:
    split = load_bytes(tmp_path, b'{"prompt": "a"}\n{"prompt": "' + b"x" * MAX_LINE_BYTES + b'"}\n')
    assert (
        split.rejected[0].reason == f"the line has {MAX_LINE_BYTES + 14:,} bytes; at most 8,388,608 are read."
    )


def test_broken_first_line_does_not_hide_the_rest(tmp_path: Path) -> None:
    split = load_bytes(tmp_path, b'{"prompt": \n{"prompt": "b"}\n')
    assert [p.turns[0] for p in split.prompts] == ["b"]
    assert [r.line for r in split.rejected] == [1]


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"prompt": "a"}, ("a",)),
        ({"text": "a"}, ("a",)),
        ({"question": "a"}, ("a",)),
        ({"input": "a"}, ("a",)),
        ({"instruction": "do", "input": "this"}, ("do\n\nthis",)),
        ({"instruction": "do", "input": ""}, ("do",)),
        ({"turns": ["a", "b"]}, ("a", "b")),
        ({"prompt": ["a", "b"]}, ("a", "b")),
        ({"prompt": [{"role": "user", "content": "a"}]}, ("a",)),
        ({"prompt": None, "question": "a"}, ("a",)),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, ("a",)),
    ],
)
def test_keys_that_hold_the_text(tmp_path: Path, row: dict[str, Any], turns: tuple[str, ...]) -> None:
    assert load_rows(tmp_path, row).prompts[0].turns == turns


def test_optional_fields_are_kept(tmp_path: Path) -> None:
    row = {
        "id": 7,
        "category": "qa",
        "sub_category": "geology",
        "turns": ["a", "b"],
        "difficulty": "hard",
        "output_len": 9,
        "language": "de",
        "source": "mine",
        "system": "be brief",
        "history": ["x"],
        "unheard_of": {"left": "alone"},
    }
    prompt = load_rows(tmp_path, row).prompts[0]
    assert (prompt.id, prompt.category, prompt.sub_category) == ("7", "qa", "geology")
    assert (prompt.difficulty, prompt.expected_tokens, prompt.language) == ("hard", 9, "de")
    assert (prompt.source, prompt.system, prompt.history) == ("mine", "be brief", ("x",))


# --- ShareGPT ---------------------------------------------------------------------------------------------


def test_sharegpt_shapes_from_public_reports() -> None:
    split = load_file(DATA / "sharegpt_odd.json")
    first_turns = {p.id: p.turns[0] for p in split.prompts}
    assert first_turns == {
        "ok": "hello there, how are you today?",
        "gpt_first": "real question?",
        "system_first": "q?",
        "openai_roles": "q?",
        "mixed_roles": "Hi",
        "user_bing": "u",
        "one_turn": "only me",
        "two_humans": "a\n\nb",
        "multi": "t1",
    }
    by_id = {p.id: p for p in split.prompts}
    assert by_id["system_first"].system == "You are X"
    assert (by_id["multi"].turns, by_id["multi"].history) == (("t1", "t2"), ("r1", "r2"))
    assert (by_id["gpt_first"].history, by_id["one_turn"].history) == (("real answer",), ())
    assert {r.line: r.reason for r in split.rejected} == {
        8: "`conversations` has no human turn; nothing could be asked.",
        9: "the row has no text; give it under one of messages, turns, prompt, text, question, input, query, "
        "instruction.",
        10: "`conversations[0]` is an empty human turn.",
    }


def test_sharegpt_answers_stay_beside_their_turns(tmp_path: Path) -> None:
    spoken = [
        ("system", "s1"),
        ("gpt", "hello"),
        ("system", "s2"),
        ("human", "t1"),
        ("gpt", ""),
        ("human", "t1b"),
    ]
    spoken += [("chatgpt", "r1"), ("gpt", "r1b"), ("human", "t2")]
    split = load_rows(tmp_path, {"conversations": [{"from": who, "value": text} for who, text in spoken]})
    prompt = split.prompts[0]
    assert prompt.system == "s1\n\ns2"
    assert prompt.turns == ("t1\n\nt1b", "t2")
    assert prompt.history == ("r1\n\nr1b",)


def test_sharegpt_format_asked_for_refuses_other_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"conversations": [{"from": "human", "value": "a"}]}\n{"prompt": "b"}\n')
    split = load_file(path, "sharegpt")
    assert len(split.prompts) == 1
    assert "has no `conversations`" in split.rejected[0].reason


# --- Spec-Bench and SPEED-Bench ---------------------------------------------------------------------------


def test_spec_bench_rows() -> None:
    split = load_file(DATA / "spec_bench_rows.jsonl")
    assert [(p.id, p.category, p.sub_category) for p in split.prompts] == [
        ("81", "writing", "mt_bench"),
        ("241", "summarization", "summarization"),
        ("500", "unknown_cat", None),
    ]
    assert split.prompts[0].turns == ("turn one", "turn two refers to turn one")
    assert {r.line: r.reason for r in split.rejected} == {
        3: "the id '241' is taken by line 2; give it its own.",
        4: "`turns` is empty; a prompt needs at least one turn.",
    }


def test_real_spec_bench_excerpt() -> None:
    split = load_file(DATA / "spec_bench_excerpt.jsonl")
    assert (len(split.prompts), split.rejected, split.duplicates) == (20, (), ())
    tasks = {p.sub_category for p in split.prompts}
    assert tasks == {"mt_bench", "translation", "qa", "math_reasoning", "rag"}
    assert all(len(p.turns) == (2 if p.sub_category == "mt_bench" else 1) for p in split.prompts)
    assert all(p.history == () for p in split.prompts), "a gold answer is not a turn of the conversation"
    assert (
        split.prompts[0].turns[1] == "Rewrite your previous response. Start every sentence with the letter A."
    )


def test_spec_bench_format_asked_for_names_the_missing_key(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"question_id": 1, "category": "qa", "turns": ["a"]}\n{"question_id": 2, "turns": ["b"]}\n'
    )
    assert load_file(path, "spec_bench").rejected[0].reason.startswith("the row has no `category`")


def test_speed_bench_keeps_its_own_sub_category(tmp_path: Path) -> None:
    row = {
        "question_id": "q",
        "category": "coding",
        "sub_category": None,
        "turns": ["a"],
        "difficulty": "hard",
    }
    prompt = load_rows(tmp_path, row).prompts[0]
    assert (prompt.sub_category, prompt.difficulty) == (None, "hard")


def test_speed_bench_placeholders_are_refused_whole(tmp_path: Path) -> None:
    placeholder = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    rows = [{"prompt": "real"}, {"question_id": "q", "category": "qa", "turns": [placeholder]}]
    with pytest.raises(WorkloadError, match=r"line 2 holds a placeholder instead of a prompt; fetch"):
        load_rows(tmp_path, *rows)


def test_registry_has_every_format_once() -> None:
    row_of: dict[str, dict[str, Any]] = {
        "sharegpt": {"conversations": []},
        "spec_bench": {"question_id": 1, "category": "qa", "turns": ["a"]},
        "jsonl": {"prompt": "a"},
    }
    first_match = {
        name: next(f for f, known in FORMATS.items() if known.matches(row)) for name, row in row_of.items()
    }
    assert first_match == {name: name for name in FORMATS}
