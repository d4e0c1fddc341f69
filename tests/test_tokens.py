"""runners.tokens: ids from GGUF files and Hugging Face folders, against llama.cpp's own, and runs that send them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest
import tokenizers

from models_roofline.gguf_header import read_header
from runners.base import Where
from runners.llama_cpp import LlamaCppEngine
from runners.loopback import LoopbackEngine
from runners.run import Runner
from runners.tokens import Tokenizer, for_model
from specbench import trace
from specbench.cell import Config, EngineAsk, Method, Workload
from specbench.errors import SpecbenchError, Unsupported
from specbench.plan import check_plan
from specbench.validity import check_cell
from tests.make_cell import record, row
from tests.token_texts import texts

TEMPLATE = "{% for m in messages %}<u>{{ m.content }}{% endfor %}"
HI = ({"role": "user", "content": "hi hi"},)

# --- tiny files -------------------------------------------------------------------------------------------


def write_gguf(
    path: Path, tokens: Mapping[str, int], merges: list[str] | None = None, **settings: Any
) -> Path:
    """A GGUF file of a vocabulary alone: token to its type, and metadata under `tokenizer.ggml.`."""
    writer = gguf.GGUFWriter(path, "llama")
    template = settings.pop("chat_template", TEMPLATE)
    scores = settings.pop("scores", None)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(tokens.values()))
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    if template:
        writer.add_chat_template(template)
    for name, value in settings.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(path: Path, **settings: Any) -> Path:
    """Byte-level BPE: `<s>`, `<u>`, every byte, and the merges of "hi" and " hi"."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = {"<s>": 3, "<u>": 3} | dict.fromkeys(alphabet, 1) | {"hi": 1, "Ġhi": 1}
    defaults = {"model": "gpt2", "pre": "gpt-2", "bos_token_id": 0, "eos_token_id": 0}
    return write_gguf(path, tokens, ["h i", "Ġ hi"], **(defaults | settings))


PIECES = {"<unk>": 2, "<s>": 3, "</s>": 3, "<u>": 3} | {f"<0x{b:02X}>": 6 for b in range(256)}
PIECES |= dict.fromkeys(("▁", "h", "i", "hi", "▁h", "▁hi"), 1)
SCORES = [0.0] * 260 + [-5.0, -6.0, -7.0, -2.0, -1.0, -3.0]


def sentence_piece(path: Path, tokens: Mapping[str, int] = PIECES, **settings: Any) -> Path:
    """SentencePiece, in which "▁h" merges before "hi"."""
    settings = {"model": "llama", "unknown_token_id": 0, "scores": SCORES[: len(tokens)]} | settings
    return write_gguf(path, tokens, **settings)


def names(tokenizer: Tokenizer, ids: tuple[int, ...]) -> list[str | None]:
    return [tokenizer.inner.id_to_token(index) for index in ids]


def folder(path: Path, config: Mapping[str, Any] | None = None, words: str = "hi you there") -> Path:
    """A Hugging Face folder whose tokenizer knows a few words, one id each."""
    path.mkdir(exist_ok=True)
    vocabulary = {word: index for index, word in enumerate(["?", "<s>", "<u>", *words.split()])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<s>", "<u>"])
    inner.save(str(path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": "<s>"} if config is None else config
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


# --- GGUF files -------------------------------------------------------------------------------------------


def test_byte_level(tmp_path: Path) -> None:
    made = Tokenizer.from_model(byte_level(tmp_path / "m.gguf"))
    assert names(made, made.encode_chat(HI)) == ["<u>", "hi", "Ġhi"]
    assert made.decode(made.encode("hi hi é")) == "hi hi é"
    assert made.template_sha256 == hashlib.sha256(TEMPLATE.encode()).hexdigest()
    assert made.template_kwargs == {"add_generation_prompt": True}


@pytest.mark.parametrize("template", [TEMPLATE, "{{ bos_token }}" + TEMPLATE])
def test_a_bos_that_the_file_asks_for_stands_there_once(tmp_path: Path, template: str) -> None:
    made = Tokenizer.from_model(byte_level(tmp_path / "m.gguf", add_bos_token=True, chat_template=template))
    assert names(made, made.encode_chat(HI)) == ["<s>", "<u>", "hi", "Ġhi"]


def test_whole_words_are_taken_before_any_merge(tmp_path: Path) -> None:
    # Without merges of its own "hi" is two bytes, but where whole words count it is one token.
    tokens = {"<s>": 3, "<u>": 3, "h": 1, "i": 1, "hi": 1}
    for pre, want in (("qwen2", ["h", "i"]), ("llama-bpe", ["<s>", "hi"])):
        path = write_gguf(tmp_path / f"{pre}.gguf", tokens, [], model="gpt2", pre=pre, bos_token_id=0,
                          chat_template="{{ messages[0].content }}")  # fmt: skip
        made = Tokenizer.from_model(path)
        assert names(made, made.encode_chat([{"role": "user", "content": "hi"}])) == want


def test_sentence_piece(tmp_path: Path) -> None:
    made = Tokenizer.from_model(sentence_piece(tmp_path / "m.gguf"))
    assert names(made, made.encode_chat(HI)) == ["<s>", "<u>", "▁hi", "▁hi"]
    assert names(made, made.encode("hié")) == ["▁hi", "<0xC3>", "<0xA9>"]
    bare = Tokenizer.from_model(
        sentence_piece(tmp_path / "n.gguf", add_space_prefix=False, add_bos_token=False)
    )
    assert names(bare, bare.encode_chat(HI)) == ["<u>", "hi", "▁hi"]
    assert bare.decode(bare.encode("hi hié")) == "hi hié"


def test_the_hash_changes_with_what_decides_ids_and_not_with_the_template(tmp_path: Path) -> None:
    first = Tokenizer.from_model(byte_level(tmp_path / "a.gguf"))
    template = Tokenizer.from_model(
        byte_level(tmp_path / "b.gguf", chat_template="{{ messages[0].content }}")
    )
    other = Tokenizer.from_model(byte_level(tmp_path / "c.gguf", pre="qwen2"))
    assert first.sha256 == template.sha256 != other.sha256
    assert first.template_sha256 != template.template_sha256


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"model": "bert"}, "of the kind 'bert'"),
        ({"pre": "viking"}, "cuts text as 'viking' does"),
        ({"add_eos_token": True}, "end with an end token"),
    ],
)
def test_a_kind_that_was_not_compared_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(Unsupported, match=rf"^workload\.prompts: m\.gguf: .*{why}.*messages"):
        Tokenizer.from_model(byte_level(tmp_path / "m.gguf", **settings))


def test_sentence_piece_whose_characters_are_no_pieces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="characters that are no pieces"):
        Tokenizer.from_model(sentence_piece(tmp_path / "m.gguf", PIECES | {"▁x": 1}, scores=[*SCORES, -8.0]))
    with pytest.raises(Unsupported, match="no scores"):
        Tokenizer.from_model(sentence_piece(tmp_path / "n.gguf", scores=None))


def test_a_base_model_and_a_file_without_vocabulary_are_refused(tmp_path: Path) -> None:
    base = Tokenizer.from_model(byte_level(tmp_path / "m.gguf", chat_template=""))
    assert (base.template_sha256, base.template_kwargs) == (None, {})
    with pytest.raises(SpecbenchError, match=r"^model: it has no chat template, .* base model"):
        base.encode_chat(HI)
    empty = tmp_path / "e.gguf"
    empty.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    with pytest.raises(SpecbenchError, match=r"^model: e\.gguf has no vocabulary"):
        Tokenizer.from_model(empty)
    (tmp_path / "x.gguf").write_text("no model")
    with pytest.raises(SpecbenchError, match=r"^model: x\.gguf: does not begin with GGUF"):
        Tokenizer.from_model(tmp_path / "x.gguf")


def test_lists_are_read_only_where_asked(tmp_path: Path) -> None:
    path = sentence_piece(tmp_path / "m.gguf")
    assert read_header(path).lists == {}
    read = read_header(
        path, ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.merges")
    ).lists
    assert read == {"tokenizer.ggml.tokens": tuple(PIECES), "tokenizer.ggml.scores": tuple(SCORES)}


# --- Hugging Face folders ---------------------------------------------------------------------------------


def test_a_folder(tmp_path: Path) -> None:
    made = Tokenizer.from_model(folder(tmp_path / "m"))
    assert made.encode_chat(HI) == (2, 3, 3)
    assert made.sha256 == hashlib.sha256((tmp_path / "m" / "tokenizer.json").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "config",
    [
        {
            "chat_template": [
                {"name": "tool_use", "template": "no"},
                {"name": "default", "template": TEMPLATE},
            ]
        },
        {"chat_template": "{{ bos_token }}" + TEMPLATE, "bos_token": {"content": "", "special": True}},
    ],
)
def test_templates_and_special_tokens_come_in_several_shapes(tmp_path: Path, config: dict[str, Any]) -> None:
    assert Tokenizer.from_model(folder(tmp_path / "m", config)).encode_chat(HI) == (2, 3, 3)


def test_a_template_in_a_file_of_its_own_goes_first(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "chat_template.jinja").write_text("{{ bos_token }}" + TEMPLATE)
    assert Tokenizer.from_model(path).encode_chat(HI) == (1, 2, 3, 3)


def test_a_folder_without_a_tokenizer_or_with_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(SpecbenchError, match=r"has no tokenizer\.json"):
        Tokenizer.from_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SpecbenchError, match=r"cannot be read as a tokenizer"):
        Tokenizer.from_model(tmp_path)
    broken = folder(tmp_path / "m")
    (broken / "tokenizer_config.json").write_text("{")
    with pytest.raises(SpecbenchError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.from_model(broken)


def test_a_prompt_without_a_token_is_refused(tmp_path: Path) -> None:
    made = Tokenizer.from_model(folder(tmp_path / "m", {"chat_template": "{{ messages[0].content }}"}))
    with pytest.raises(SpecbenchError, match=r"^workload: a prompt has no token"):
        made.encode_chat([{"role": "user", "content": ""}])


def test_a_model_that_is_not_here_names_the_need() -> None:
    with pytest.raises(
        SpecbenchError, match=r'^model: some-model is neither .*; workload\.prompts = "ids" needs'
    ):
        for_model("some-model", {})


# --- runs that send ids -----------------------------------------------------------------------------------


def ids_plan(model: Path | str, engine: str, **workload: Any) -> dict[str, Any]:
    base = {"split": "demo", "max_tokens": 20, "prompts": "ids"}
    return {
        "name": "ids",
        "model": str(model),
        "workload": base | workload,
        "repeat": {"blocks": 1},
        "engine": [{"name": engine}],
        "method": [{"name": "none", "baseline": True}],
    }


def run(tmp_path: Path, plan: dict[str, Any]) -> trace.Run:
    Runner(check_plan(plan, "test"), tmp_path / "r").run()
    return trace.load(tmp_path / "r")


@pytest.mark.parametrize("history", ["own", "frozen"])
def test_a_run_with_ids(tmp_path: Path, history: str) -> None:
    prompts = tmp_path / "p.jsonl"
    lines = [{"turns": ["hi you", "there there"], "id": "a"}, {"turns": ["you"], "id": "b"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    template = {"chat_template": "{{ style }} " + TEMPLATE}
    model = folder(tmp_path / "m", template)
    plan = ids_plan(model, "loopback", file=str(prompts), history=history, template={"style": "hi"})
    found = run(tmp_path, plan)
    facts = found.records[0].facts
    tokenizer = Tokenizer.from_model(model)
    assert (facts.tokenizer_sha256, facts.template_sha256) == (tokenizer.sha256, tokenizer.template_sha256)
    assert facts.extra["template_kwargs"] == {"add_generation_prompt": True, "style": "hi"}
    rows = found.requests[~found.requests["warmup"]]
    # "hi" of the style, then "<u>" and the words of each message; the loopback's reply has 20 words.
    first, second = 1 + (1 + 2), 1 + (1 + 2) + (1 + 20) + (1 + 2)
    by_key = {(r.prompt_id, r.turn): r.prompt_tokens for r in rows.itertuples()}
    assert by_key[("a", 0)] == first
    assert by_key[("b", 0)] == 1 + (1 + 1)
    assert by_key[("a", 1)] == second
    assert "token-counts-disagree" not in {note.code for note in found.records[0].validity}


def test_an_engine_that_takes_no_ids_is_refused_before_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoopbackEngine, "ids_path", None)
    with pytest.raises(Unsupported, match=r"^workload\.prompts: loopback takes no token ids"):
        run(tmp_path, ids_plan(folder(tmp_path / "m"), "loopback"))
    assert not (tmp_path / "r").exists()


def test_a_prompt_that_the_template_refuses_stops_the_run_before_anything(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", {"chat_template": "{{ raise_exception('not today') }}"})
    with pytest.raises(SpecbenchError, match="not today"):
        run(tmp_path, ids_plan(model, "loopback"))
    assert not (tmp_path / "r").exists()


def test_arguments_for_the_template_need_ids() -> None:
    plan = ids_plan("m", "loopback", prompts="messages", template={"enable_thinking": False})
    with pytest.raises(SpecbenchError, match=r'^test: workload: template needs prompts = "ids"'):
        check_plan(plan, "test")


def test_a_server_that_counts_other_prompt_tokens_is_found() -> None:
    rows = [row(i, [0.1, 0.2], [1, 1], prompt_tokens=11, output_tokens=2) for i in range(3)]
    table = trace.request_table(rows)

    def said(ids: dict[int, int]) -> list[str]:
        notes = check_cell(record(), table, [], prompt_ids=ids)
        return [note.advice for note in notes if note.code == "token-counts-disagree"]

    assert said({0: 11, 1: 11, 2: 11}) == []
    assert said({}) == []
    (advice,) = said({0: 10, 1: 10, 2: 11})
    assert advice.startswith("In 2 of 3 requests the server counts other prompt tokens")
    assert "(+1 in the first)" in advice


# --- against llama.cpp ------------------------------------------------------------------------------------


@pytest.mark.engine
def test_ids_are_llama_cpps_own(model: str, tmp_path: Path) -> None:
    engine, tokenizer = LlamaCppEngine(), Tokenizer.from_gguf(Path(model))
    config = Config(
        engine=EngineAsk(name="llamacpp"), model=model, method=Method(name="none"), workload=Workload()
    )
    launch = engine.launch(config, engine.probe(Where()).version or "?")
    with (
        engine.start(launch, tmp_path / "log") as session,
        httpx.Client(base_url=session.address, timeout=60) as http,
    ):
        for text in texts():
            theirs = http.post("/tokenize", json={"content": text, "parse_special": True}).json()["tokens"]
            assert list(tokenizer.encode(text)) == theirs, text
            messages = [{"role": "user", "content": text}]
            prompt = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
            ask = {"content": prompt, "add_special": True, "parse_special": True}
            assert (
                list(tokenizer.encode_chat(messages)) == http.post("/tokenize", json=ask).json()["tokens"]
            ), text
        assert session.facts.template_sha256 == tokenizer.template_sha256
    assert len(texts()) > 200


@pytest.mark.engine
def test_ids_and_messages_get_the_same_greedy_replies(model: str, tmp_path: Path) -> None:
    # The baseline's own prompts: a chat and the ids of that chat are one prompt to the server.
    replies = {}
    for prompts in ("messages", "ids"):
        plan = ids_plan(model, "llamacpp", prompts=prompts, categories=["explain"], prompts_per_category=2)
        found = run(tmp_path / prompts, plan)
        rows = found.requests[~found.requests["warmup"]]
        assert set(rows["status"]) == {"ok"}
        assert set(rows["steps_from"]) == {"grouped"}
        assert (rows["steps"] == rows["output_tokens"] - 1).all()
        codes = {note.code for r in found.records for note in r.validity}
        assert "token-counts-disagree" not in codes
        replies[prompts] = {
            (r.prompt_id, r.turn): (r.prompt_tokens, r.output_tokens, r.output_sha256)
            for r in rows.itertuples()
        }
    assert replies["ids"] == replies["messages"]
