"""runners.chat_template: the names and rules that model templates rely on."""

from __future__ import annotations

import hashlib
from datetime import datetime

import pytest

from runners.chat_template import ChatTemplate
from specbench.errors import SpecbenchError

HELLO = ({"role": "user", "content": "Hello"},)
NOW = datetime(2026, 3, 9, 12, 30)


def test_messages_special_tokens_and_the_prompt_for_an_answer() -> None:
    text = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert ChatTemplate(text, "<s>", "</s>").render(HELLO) == "<s>[user]Hello</s>[assistant]"


def test_blocks_leave_no_blank_lines() -> None:
    text = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert ChatTemplate(text).render(HELLO) == "Hello\n"


def test_loop_controls_and_the_generation_block() -> None:
    text = (
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}{{ messages[0].content }}{% endgeneration %}"
    )
    assert ChatTemplate(text).render(HELLO) == "01Hello"


def test_json_is_not_escaped_for_html() -> None:
    text = "{{ {'a': \"<b> & 'ü'\"} | tojson }}{{ [1] | tojson(indent=1) }}"
    assert ChatTemplate(text).render(HELLO) == '{"a": "<b> & \'ü\'"}[\n 1\n]'


def test_the_clock_stands_still_and_is_recorded() -> None:
    dated = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=NOW)
    assert dated.render(HELLO) == "09 Mar 2026"
    assert dated.arguments == {"add_generation_prompt": True, "date": "2026-03-09"}


def test_arguments_reach_the_template_and_the_record() -> None:
    template = ChatTemplate("{{ 'on' if enable_thinking else 'off' }}", kwargs={"enable_thinking": False})
    assert template.render(HELLO) == "off"
    assert template.arguments == {"add_generation_prompt": True, "enable_thinking": False}


def test_the_hash_is_the_texts() -> None:
    text = "{{ bos_token }}"
    assert ChatTemplate(text, "<s>").sha256 == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{{ raise_exception('no system role here') }}", "no system role here"),
        ("{{ messages[0].content.no.such }}", "no attribute"),
        ("{{ messages[3].content }}", "no element 3"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 // 0 }}", "by zero"),
    ],
)
def test_what_a_template_refuses_is_one_sentence(text: str, why: str) -> None:
    with pytest.raises(
        SpecbenchError, match=rf"^workload: the model's chat template cannot .*\(user\): .*{why}"
    ):
        ChatTemplate(text).render(HELLO)


def test_a_template_that_is_no_jinja() -> None:
    with pytest.raises(SpecbenchError, match=r"^model: its chat template is no Jinja .* workload\.prompts"):
        ChatTemplate("{% for %}").render(HELLO)
