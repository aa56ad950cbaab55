"""What each template makes of a conversation: exact ids and labels, and the prompts of inference."""

import copy
import json
import re
import tracemalloc
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
from model_families import CHAT
from shared_fixtures import make_tokenizer

from lit_ft import RecipeError
from lit_ft.data.template_check import compare_with_template
from lit_ft.data.text.chat_template import BUILT_IN, ChatTemplate, set_chat_template
from lit_ft.data.text.formats import messages
from lit_ft.data.text.rendering import chat_samples, expected_answer, prompt_of
from lit_ft.data.tokens.preparation import Preparation
from lit_ft.data.tokens.tokenization import NOTES, Tokenization
from lit_ft.data.tokens.truncation import Encoded
from lit_ft.packed_batch import IGNORE_INDEX

QWEN25 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You are Qwen.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- set call = tool_call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

QWEN3 = """\
{%- set ns = namespace(last_query=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role != 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- else %}
        {%- set content = message.content %}
        {%- set thinking = '' %}
        {%- if '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or thinking) %}
            {{- '<think>\\n' + thinking + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"] | trim + eos_token }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}"""

PHI3 = """\
{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

LLAMA31 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system + "<|eot_id|>" }}
{%- if tools %}
    {%- set first = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) + "\\n\\n" }}{%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ('tool', 'ipython') %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is string %}{{- {"output": message.content} | tojson }}
        {%- else %}{{- message.content | tojson }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

R1 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}
    {%- elif message.role == 'user' %}{{- '<|User|>' + message.content }}
    {%- else %}{{- '<|Assistant|>' + message.content.split('</think>')[-1] + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}"""

COHERE2 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
        {%- if message.tool_calls %}
            {{- '<|START_ACTION|>[' }}
            {%- for call in message.tool_calls %}
                {{- '{"tool_name": "' + call.function.name + '", "parameters": ' }}
                {{- call.function.arguments | tojson + '}' }}
            {%- endfor %}
            {{- ']<|END_ACTION|><|END_OF_TURN_TOKEN|>' }}
        {%- else %}{{- '<|START_RESPONSE|>' + message.content + '<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' }}
        {%- endif %}
    {%- else %}
        {{- '<|START_OF_TURN_TOKEN|><|' + ('USER' if message.role == 'user' else 'SYSTEM') + '_TOKEN|>' }}
        {{- message.content + '<|END_OF_TURN_TOKEN|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}"""

COMMAND_A = (
    COHERE2.rpartition("{%- if add")[0]
    + """\
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
{%- if add_generation_prompt %}{{- '<|START_RESPONSE|>' }}{%- endif %}"""
)
"""Opens the next turn behind each conversation, whoever speaks."""

GEMMA4 = """\
{{- bos_token }}
{%- if tools %}{{- '<|turn>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<turn|>\\n' }}
{%- endif %}
{%- set ns = namespace(last='') %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- ('' if ns.last == 'call' else '<|tool_response>') + message.content + '<tool_response|>' }}
        {%- set ns.last = 'result' %}
    {%- else %}
        {%- if not (message.role == 'assistant' and ns.last == 'result') %}
            {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {{- '<|tool_call>call:' + call.function.name + call.function.arguments | tojson + '<tool_call|>' }}
            {%- endfor %}
            {{- '<|tool_response>' }}
            {%- set ns.last = 'call' %}
        {%- else %}
            {{- message.content + '<turn|>\\n' }}
            {%- set ns.last = '' %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.last != 'result' %}{{- '<|turn>model\\n' }}{%- endif %}"""

QWEN3_THINKING = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- set thinking = message.reasoning_content or '' %}
    {%- if '</think>' in content %}
        {%- set thinking = content.split('</think>')[0].split('<think>')[-1] %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last %}
        {{- '<think>\\n' + thinking.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""

ENDS_THE_TEXT = """\
{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- else %}{{- eos_token }}{%- endif %}"""

VICUNA = """\
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content + '\\n\\n' }}
    {%- elif message.role == 'user' %}{{- 'USER: ' + message.content + '\\n' }}
    {%- else %}{{- 'ASSISTANT: ' + message.content + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT:' }}{%- endif %}"""

STRIPS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


class Case(NamedTuple):
    """A template, its tokens, and what the answers of CHAT are in each sample."""

    template: str
    special: str
    eos: str
    answers: list[list[str]]
    notes: dict[str, int] = {}  # noqa: RUF012 (never changed)
    bos: str = "<s>"


def answers(end: str, opening: str = "", split: bool = False) -> list[list[str]]:
    said = [opening + message["content"] + end for message in CHAT if message["role"] == "assistant"]
    return [[text] for text in said] if split else [said]


LLAMA_SPECIAL = "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>"
CASES = {
    "chatml": Case(BUILT_IN["chatml"], "", "<|im_end|>", answers("<|im_end|>")),
    "llama3": Case(BUILT_IN["llama3"], LLAMA_SPECIAL, "<|eot_id|>", answers("<|eot_id|>"), bos="<|begin_of_text|>"),
    "gemma": Case(
        BUILT_IN["gemma"], "<bos> <start_of_turn> <end_of_turn>", "<eos>", answers("<end_of_turn>"), bos="<bos>"
    ),
    "plain": Case(BUILT_IN["plain"], "<s> </s>", "</s>", answers("</s>", " ")),
    "qwen2.5": Case(QWEN25, "", "<|im_end|>", answers("<|im_end|>")),
    "qwen3": Case(QWEN3, "", "<|im_end|>", answers("<|im_end|>", "<think>\n\n</think>\n\n", split=True), {"split": 1}),
    "mistral": Case(MISTRAL, "<s> </s> [INST] [/INST]", "</s>", answers("</s>", " ", split=True), {"split": 1}),
    "phi3": Case(PHI3, "<|system|> <|user|> <|assistant|> <|end|>", "<|endoftext|>", answers("<|end|>")),
    "llama3.1": Case(LLAMA31, LLAMA_SPECIAL, "<|eot_id|>", answers("<|eot_id|>"), bos="<|begin_of_text|>"),
    "cohere2": Case(
        COHERE2,
        "<|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|SYSTEM_TOKEN|> <|CHATBOT_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|> "
        "<|START_ACTION|> <|END_ACTION|>",
        "<|END_OF_TURN_TOKEN|>",
        answers("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "<|START_RESPONSE|>"),
    ),
    "command a": Case(
        COMMAND_A,
        "<|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|SYSTEM_TOKEN|> <|CHATBOT_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|>",
        "<|END_OF_TURN_TOKEN|>",
        answers("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    ),
    "gemma4": Case(
        GEMMA4,
        "<bos> <|turn> <turn|> <|tool_call> <tool_call|> <|tool_response> <tool_response|>",
        "<eos>",
        answers("<turn|>"),
        bos="<bos>",
    ),
    "ends the text": Case(
        ENDS_THE_TEXT, "<|system|> <|user|> <|assistant|> <|end|>", "<|endoftext|>", answers("<|end|>")
    ),
    "vicuna": Case(VICUNA, "<s> </s>", "</s>", answers("</s>", " ", split=True), {"split": 1, "end of turn added": 2}),
    "strips": Case(STRIPS, "", "<|im_end|>", answers("<|im_end|>")),
}
R1_SPECIAL = "<s> </s> <|User|> <|Assistant|>"


def make(template: str, special: str = "", eos: str = "<|im_end|>", bos: str = "<s>") -> Any:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([*special.split(), eos], special_tokens=True)
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    if bos in special.split():
        tokenizer.bos_token = bos
    return tokenizer


def of_case(name: str) -> Any:
    case = CASES[name]
    return make(case.template, case.special, case.eos, case.bos)


def encode(tokenizer: Any, *rows: dict[str, Any], form: str = "messages", **options: Any) -> Encoded:
    return Tokenization(tokenizer, form, **options).encode(copy.deepcopy(rows))


def samples(encoded: Encoded) -> list[tuple[list[int], list[int]]]:
    cuts = np.cumsum(encoded.lengths)[:-1]
    parts = zip(np.split(encoded.ids, cuts), np.split(encoded.labels, cuts), strict=True)
    return [(ids.tolist(), labels.tolist()) for ids, labels in parts] if len(encoded.lengths) else []


def runs(labels: list[int]) -> list[tuple[int, int]]:
    """Where each stretch of supervised tokens begins and ends."""
    is_target = np.array([False, *(label != IGNORE_INDEX for label in labels), False])
    borders = np.flatnonzero(np.diff(is_target))
    return [(int(a), int(b)) for a, b in borders.reshape(-1, 2)]


def spelled(tokenizer: Any, encoded: Encoded) -> list[list[str]]:
    """The supervised stretches of each sample."""
    assert not encoded.bad
    found = samples(encoded)
    for ids, labels in found:
        assert [a for a, b in zip(ids, labels, strict=True) if b != IGNORE_INDEX] == [b for b in labels if b >= 0]
    return [[tokenizer.decode(ids[a:b]) for a, b in runs(labels)] for ids, labels in found]


def noted(encoded: Encoded) -> dict[str, int]:
    assert set(encoded.notes) <= set(NOTES)
    return dict(+encoded.notes)


def prompts(tokenizer: Any, messages: list[Any], **more: Any) -> list[list[int]]:
    """What the model is given at inference, before each answer."""
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return [
        tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, **more)["input_ids"]
        for i in places
        if i
    ]


# --- templates -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("has_system", [True, False])
def test_answers_are_supervised_and_prompts_are_those_of_inference(name: str, has_system: bool) -> None:
    tokenizer, chat = of_case(name), CHAT if has_system else CHAT[1:]
    encoded = encode(tokenizer, {"messages": chat})
    wanted, notes = CASES[name].answers, CASES[name].notes
    if name == "mistral" and not has_system:  # nothing moves
        wanted, notes = answers("</s>", " "), {}
    assert spelled(tokenizer, encoded) == wanted
    before = [ids[:start] for ids, labels in samples(encoded) for start, _ in runs(labels)]
    assert before == prompts(tokenizer, chat)
    assert [labels[-1] for _, labels in samples(encoded)] == [ids[-1] for ids, _ in samples(encoded)]
    assert noted(encoded) == notes


@pytest.mark.parametrize("name", CASES)
def test_the_last_answer_alone(name: str) -> None:
    tokenizer = of_case(name)
    encoded = encode(tokenizer, {"messages": CHAT}, supervise="last")
    assert spelled(tokenizer, encoded) == [CASES[name].answers[-1][-1:]]
    ((ids, labels),) = samples(encoded)
    assert ids[: runs(labels)[0][0]] == prompts(tokenizer, CHAT)[-1]


@pytest.mark.parametrize("name", CASES)
def test_every_token_through_the_last_answer(name: str) -> None:
    tokenizer = of_case(name)
    ((ids, labels),) = samples(encode(tokenizer, {"messages": CHAT}, supervise="all"))
    assert ids == labels
    last = tokenizer(CASES[name].answers[-1][-1], add_special_tokens=False)["input_ids"]
    assert ids == prompts(tokenizer, CHAT)[-1] + last


@pytest.mark.parametrize("name", CASES)
def test_text_is_as_the_template_writes_it(name: str) -> None:
    tokenizer = of_case(name)
    ids, _ = samples(encode(tokenizer, {"messages": CHAT[1:3]}))[0]
    whole = tokenizer.apply_chat_template(CHAT[1:3], tokenize=False)
    if name == "vicuna":
        assert tokenizer.decode(ids) == whole.removesuffix("\n") + "</s>"
    else:
        assert whole.startswith(tokenizer.decode(ids))
        behind = ("", "\n", "\n<|endoftext|>", "<|endoftext|>", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>")
        assert whole[len(tokenizer.decode(ids)) :] in behind


def test_the_prompt_of_an_answer_behind_several_results_that_are_spelled_out() -> None:
    call = {"function": {"name": "look", "arguments": {}}}
    row = [
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "a lamp"},
        {"role": "tool", "content": "a cup"},
        {"role": "assistant", "content": "there"},
    ]
    template = ChatTemplate(make(BUILT_IN["chatml"]))
    prompt, question = prompt_of(messages({"messages": row}), template)
    results = "<tool_response>\na lamp\n</tool_response>\n<tool_response>\na cup\n</tool_response>"
    assert prompt.endswith(f"{results}<|im_end|>\n<|im_start|>assistant\n")
    assert question["content"] == results
    assert expected_answer(messages({"messages": row}), template) == "there"


def test_golden_ids_of_chatml() -> None:
    tokenizer = of_case("chatml")
    ((ids, labels),) = samples(encode(tokenizer, {"messages": CHAT[1:3]}))
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    newline, *_ = tokenizer("\n")["input_ids"]
    pieces = {text: tokenizer(text)["input_ids"] for text in ("user\n红 book", "assistant\n", "a lamp")}
    prompt = [start, *pieces["user\n红 book"], end, newline, start, *pieces["assistant\n"]]
    assert ids == [*prompt, *pieces["a lamp"], end]
    assert labels == [IGNORE_INDEX] * len(prompt) + [*pieces["a lamp"], end]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_square_of_the_turns() -> None:
    turns = [{"role": role, "content": "a" * 1000} for role in ("user", "assistant")] * 200
    chat, template = messages({"messages": turns}), ChatTemplate(of_case("chatml"))
    text = template.render(chat.messages)
    tracemalloc.start()
    ((*_, last),) = chat_samples(chat, template, "assistant", "", [])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert last == ("a" * 1000 + "<|im_end|>", True)
    assert peak_bytes < 10 * len(text)  # the texts up to each of 200 answers have 200 times its characters


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_templates_by_name(name: str) -> None:
    tokenizer = of_case(name)
    tokenizer.chat_template = None
    set_chat_template(tokenizer, name)
    assert tokenizer.chat_template == CASES[name].template
    if name != "plain":
        lacking = make_tokenizer() if name != "chatml" else make_without_chatml()
        with pytest.raises(RecipeError, match=f"data.chat_template='{name}' needs the tokens <"):
            set_chat_template(lacking, name)


def test_a_name_of_no_built_in_template() -> None:
    with pytest.raises(RecipeError, match="plain.; give one of these, or leave it out for the tokenizer's own"):
        set_chat_template(make_tokenizer(), "qwen")


def make_without_chatml() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))


def test_what_built_in_templates_write() -> None:
    def written(name: str) -> str:
        return of_case(name).apply_chat_template(CHAT[:3], tokenize=False)

    assert written("chatml") == (
        "<|im_start|>system\nthe cup is red<|im_end|>\n<|im_start|>user\n红 book<|im_end|>\n"
        "<|im_start|>assistant\na lamp<|im_end|>\n"
    )
    assert written("llama3") == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nthe cup is red<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n红 book<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\na lamp<|eot_id|>"
    )
    assert written("gemma") == (
        "<bos><start_of_turn>user\nthe cup is red\n\n红 book<end_of_turn>\n<start_of_turn>model\na lamp<end_of_turn>\n"
    )
    assert written("plain") == "System: the cup is red\nUser: 红 book\nAssistant: a lamp</s>\n"


def test_thinking_of_earlier_answers_is_dropped_as_at_inference() -> None:
    tokenizer, chat = of_case("qwen3"), copy.deepcopy(CHAT)
    chat[2]["content"] = "<think>\nred\n</think>\n\na lamp"
    chat[4]["content"] = "<think>blue</think>the cup"
    encoded = encode(tokenizer, {"messages": chat})
    assert spelled(tokenizer, encoded) == [
        ["<think>\nred\n</think>\n\na lamp<|im_end|>"],
        ["<think>\nblue\n</think>\n\nthe cup<|im_end|>"],
    ]
    assert [ids[: runs(labels)[0][0]] for ids, labels in samples(encoded)] == prompts(tokenizer, chat)
    assert "red\n</think>" not in tokenizer.decode(samples(encoded)[1][0])
    assert noted(encoded) == {"split": 1}


def test_options_of_a_template() -> None:
    tokenizer, options = of_case("qwen3"), {"enable_thinking": False}
    encoded = encode(tokenizer, {"messages": CHAT}, template_options=options)
    assert spelled(tokenizer, encoded) == answers("<|im_end|>", split=True)
    before = [ids[: runs(labels)[0][0]] for ids, labels in samples(encoded)]
    assert before == prompts(tokenizer, CHAT, **options)
    with pytest.raises(RecipeError, match="uses no 'thinking_budget'; take it out"):
        encode(tokenizer, {"messages": CHAT}, template_options={"thinking_budget": 3})


def test_options_are_defaults_of_the_template_that_is_saved() -> None:
    tokenizer, options = of_case("qwen3"), {"enable_thinking": False}
    open_prompt, closed_prompt = prompts(tokenizer, CHAT), prompts(tokenizer, CHAT, **options)
    assert open_prompt != closed_prompt
    set_chat_template(tokenizer, None, options)
    assert prompts(tokenizer, CHAT) == closed_prompt
    assert prompts(tokenizer, CHAT, enable_thinking=True) == open_prompt
    once = tokenizer.chat_template
    set_chat_template(tokenizer, None, options)
    assert tokenizer.chat_template == once
    with pytest.raises(RecipeError, match="uses no 'thinking_budget'; take it out"):
        set_chat_template(tokenizer, None, {"thinking_budget": 3})


def test_a_date_is_written_into_the_template_that_is_saved() -> None:
    tokenizer, day = of_case("qwen3"), {"strftime_now": "2025-08-05"}
    set_chat_template(
        tokenizer, "{{ strftime_now('%d %b') }} {{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    set_chat_template(tokenizer, None, {**day, "mood": "a'b\n%}é"})
    assert tokenizer.apply_chat_template(CHAT[:1], tokenize=False) == "05 Aug a'b\n%}é" + CHAT[0]["content"]
    assert ChatTemplate(tokenizer, day).render(CHAT[:1]).startswith("05 Aug")
    with pytest.raises(
        RecipeError, match="strftime_now=2025-08-06, but .* was saved with 2025-08-05 in place of today"
    ):
        set_chat_template(tokenizer, None, {"strftime_now": "2025-08-06"})


CALL = [
    {"role": "user", "content": "red book"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "find", "arguments": {"what": "cup"}}}]},
    {"role": "tool", "name": "find", "content": "a blue one"},
    {"role": "assistant", "content": "a lamp"},
]


def test_options_that_rows_give_a_template() -> None:
    tokenizer = make("{{- mood ~ ' ' }}" + STRIPS)
    given: list[Any] = [
        {"mood": "sad", "other": None},
        '{"mood": "glad", "other": 1}',
        {},
        "",
        [1],
        {"mood": "sad", "messages": []},
    ]
    rows = [{"messages": CHAT[:3], "chat_template_kwargs": one} for one in given]
    made = Tokenization(tokenizer, "messages", template_options={"mood": "calm"})
    encoded = made.encode(copy.deepcopy(rows))
    moods = [tokenizer.decode(ids).partition(" ")[0] for ids, _ in samples(encoded)]
    assert moods == ["sad", "glad", "calm", "calm"]
    assert noted(encoded) == {"options left out": 1}
    assert [said.partition(";")[0] for _, said in encoded.bad] == [
        "'chat_template_kwargs' is a list of int",
        "with its 'chat_template_kwargs': data.template_options: 'messages' comes from each row",
    ]
    compared = compare_with_template(made, [("", row) for row in copy.deepcopy(rows)])
    assert (compared.count, compared.other_tokens, compared.other_prompt) == (4, [], [])


DATED = {
    "in a variable": "{% set form = '%d %b %Y' %}{{ strftime_now(form) }}",
    "by keyword, in a macro": "{% macro day(form) %}{{ strftime_now(format=form) }}{% endmacro %}{{ day('%d %b %Y') }}",
    "beside a system prompt": "{% if messages[0].role == 'system' %}{{ strftime_now('%d %b %Y') }}{% endif %}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DATED)
def test_the_date_of_a_template_however_it_asks_for_it(name: str) -> None:
    tokenizer = make(f"\n{DATED[name]}\n{STRIPS}")
    without_system = {"messages": CHAT[1:3]}
    assert noted(encode(tokenizer, {"messages": CHAT[:3]})) == {"dated": 1}
    assert noted(encode(tokenizer, without_system)) == ({} if "system" in name else {"dated": 1})
    encoded = encode(tokenizer, {"messages": CHAT[:3]}, template_options={"strftime_now": "2001-02-03"})
    assert noted(encoded) == {}
    ((ids, _),) = samples(encoded)
    assert tokenizer.decode(ids).startswith("\n03 Feb 2001")
    set_chat_template(tokenizer, None, {"strftime_now": "2001-02-03"})  # as it is saved
    assert tokenizer.apply_chat_template(CHAT[:3], tokenize=False).startswith("\n03 Feb 2001")
    assert noted(encode(tokenizer, {"messages": CHAT[:3]})) == {}


def test_a_turn_is_supervised_through_the_token_that_generation_stops_at() -> None:
    """Behind a call, Gemma 4 has to open the tool's response, and Cohere 2 to end its turn."""
    assert spelled(of_case("gemma4"), encode(of_case("gemma4"), {"messages": CALL})) == [
        ['<|tool_call>call:find{"what": "cup"}<tool_call|><|tool_response>', "a lamp<turn|>"]
    ]
    assert spelled(of_case("cohere2"), encode(of_case("cohere2"), {"messages": CALL})) == [
        [
            '<|START_ACTION|>[{"tool_name": "find", "parameters": {"what": "cup"}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>',
            "<|START_RESPONSE|>a lamp<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        ]
    ]
    ends = {"cohere2": "<|END_OF_TURN_TOKEN|>", "gemma4": "<turn|>", "ends the text": "<|end|>"}
    for name, end in {**ends, "command a": "<|END_OF_TURN_TOKEN|>"}.items():
        assert ChatTemplate(of_case(name)).end_of_turn == end


def test_thinking_that_the_generation_prompt_opens_is_no_loss() -> None:
    tokenizer, chat = make(QWEN3_THINKING), copy.deepcopy(CHAT)
    chat[2]["content"] = "<think>\nred\n</think>\n\na lamp"
    chat[4] |= {"content": "the cup", "reasoning_content": "blue"}
    encoded = encode(tokenizer, {"messages": chat})
    assert spelled(tokenizer, encoded) == [
        ["red\n</think>\n\na lamp<|im_end|>"],
        ["blue\n</think>\n\nthe cup<|im_end|>"],
    ]
    assert [ids[: runs(labels)[0][0]] for ids, labels in samples(encoded)] == prompts(tokenizer, chat)
    assert noted(encoded) == {"split": 1}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("form", ["messages", "sharegpt"])
def test_thinking_under_a_key_that_a_template_does_not_show_is_counted(key: str, form: str) -> None:
    answer = {"role": "assistant", "content": "a lamp", key: "red"}
    rows = [{"messages": [CHAT[1], answer]}, {"messages": CHAT[1:3]}]
    if form == "sharegpt":
        of = {"role": "from", "content": "value"}
        rows = [
            {"conversations": [{of.get(k, k): v for k, v in message.items()} for message in row["messages"]]}
            for row in rows
        ]
    if key == "reasoning_content":
        assert noted(encode(make(QWEN3_THINKING), *rows, form=form)) == {}
    tokenizer = of_case("chatml")
    encoded = encode(tokenizer, *rows, form=form)
    assert noted(encoded) == {"thinking left out": 1}
    assert Tokenization(tokenizer, form).describe(encoded.notes, 2) == [
        "1 of the answers of 2 rows: has thinking (reasoning_content, reasoning, thinking) that the chat template of "
        "'' does not show, so it is not trained; write it into the content, or take it out"
    ]


@pytest.mark.parametrize("answer", ["a lamp", "<table> red", "<think red"])
def test_a_generation_prompt_that_opens_thinking(answer: str) -> None:
    """The answer is whole, also where it begins as the generation prompt goes on."""
    tokenizer = make(R1, R1_SPECIAL, "</s>")
    encoded = encode(tokenizer, {"messages": [CHAT[1], {"role": "assistant", "content": answer}]})
    assert spelled(tokenizer, encoded) == [[f"{answer}</s>"]]
    ((ids, labels),) = samples(encoded)
    assert tokenizer.decode(ids[: runs(labels)[0][0]]) == "<s><|User|>红 book<|Assistant|>"
    assert noted(encoded) == {"other opening": 1}


def test_the_prompt_ends_between_tokens() -> None:
    """GLM 4.7 opens thinking at inference and closes it in an answer without: ``<think>`` and ``</think>``."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ '</think>' if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
        "{{ '<|assistant|><think>' if add_generation_prompt }}"
    )
    tokenizer = make(template, "<|user|> <|assistant|>", "<|user|>")
    tokenizer.add_tokens(["<think>", "</think>"])
    encoded = encode(tokenizer, {"messages": CHAT[1:]})
    assert spelled(tokenizer, encoded) == [
        ["</think>a lamp<|user|>", "</think>the <绿> cup 😀\n\nis blue<|user|>"],
    ]
    ((ids, labels),) = samples(encoded)
    whole = tokenizer.apply_chat_template(CHAT[1:], return_dict=True)["input_ids"]
    assert ids[:-1] == whole
    assert [ids[start] for start, _ in runs(labels)] == tokenizer.convert_tokens_to_ids(["</think>"] * 2)
    assert noted(encoded) == {"other opening": 2, "end of turn added": 2}


def test_thinking_that_a_template_writes_in_no_turn_is_trained_as_it_follows_the_prompt() -> None:
    """DeepSeek-R1's template drops the thinking of all answers, and its generation prompt opens it."""
    tokenizer = make(R1, R1_SPECIAL, "</s>")
    thought = [CHAT[1], {"role": "assistant", "content": "<think>\nred\n</think>a lamp"}]
    chat = [*thought, {"role": "user", "content": "under"}, {"role": "assistant", "content": "<think>blue</think>cup"}]
    encoded = encode(tokenizer, {"messages": chat})
    assert spelled(tokenizer, encoded) == [["red\n</think>a lamp</s>"], ["blue</think>cup</s>"]]
    assert [ids[: runs(labels)[0][0]] for ids, labels in samples(encoded)] == prompts(tokenizer, chat)
    assert noted(encoded) == {"thinking put back": 2, "split": 1}
    assert Tokenization(tokenizer, "messages", max_length=8).describe(Counter(truncated=2, split=1), 1) == [
        "2 of the samples of 1 row: longer than data.max_length=8 tokens, truncated at the end "
        "(data.overlong=truncate)",
        "1 of the answers of 1 row: made a sample of its own, because the chat template of '' writes earlier turns "
        "otherwise than the last",
    ]


def test_answers_without_the_thinking_that_the_generation_prompt_opens_are_said_precisely() -> None:
    tokenizer = make(R1, R1_SPECIAL, "</s>")
    encoded = encode(tokenizer, {"messages": CHAT[1:3]})
    assert Tokenization(tokenizer, "messages").describe(encoded.notes, 1) == [
        "1 of the answers of 1 row: begins in another way than the chat template of '' opens the assistant's turn at "
        "inference ('<|Assistant|><think>\\n', written is '<|Assistant|>'); trained as the template writes "
        "it"
    ]


def test_thinking_that_a_template_leaves_out_is_counted() -> None:
    template = STRIPS.replace("message.content", "message.content.split('</think>')[-1]")
    chat = [CHAT[1], {"role": "assistant", "content": "<think>\nred\n</think>a lamp"}]
    encoded = encode(make(template), {"messages": chat}, {"messages": CHAT[1:3]})
    assert noted(encoded) == {"answer left out in part": 1}


def test_contents_that_a_template_strips() -> None:
    tokenizer = of_case("strips")
    chat = [{**message, "content": f"\n {message['content']} \n"} for message in CHAT]
    encoded = encode(tokenizer, {"messages": chat})
    assert spelled(tokenizer, encoded) == answers("<|im_end|>")
    assert [ids[:start] for ids, labels in samples(encoded) for start, _ in runs(labels)] == prompts(tokenizer, chat)
    assert noted(encoded) == {}


def test_an_end_that_is_no_special_token_is_kept() -> None:
    template = "{% for m in messages %}{{ '### ' + m.role + ': ' + m.content + ' ###\\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ '### assistant: ' }}{% endif %}"
    tokenizer = make(template, "</s>", "</s>")
    encoded = encode(tokenizer, {"messages": CHAT[:3]})
    assert spelled(tokenizer, encoded) == [["a lamp ###</s>"]]
    assert noted(encoded) == {"end of turn added": 1}


REFUSED = {
    "raises on a system role": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + STRIPS,
        "does not render it (TemplateError: System role not supported)",
    ),
    "drops the system text": (
        STRIPS.replace("in messages", "in messages if message.role != 'system'"),
        "leaves out the text of turn 1 (system)",
    ),
    "drops the user's text": (
        STRIPS.replace("message.content | trim", "(message.content if message.role != 'user' else '')"),
        "leaves out the text of turn 2 (user)",
    ),
    "rewrites earlier turns": (
        STRIPS.replace("{%- for", "{{ messages | length }}{%- for"),
        "writes the turns before turn 3 in another way once it follows",
    ),
    "drops tools beside a system prompt": (
        "{% if tools and messages[0].role != 'system' %}{{ tools | tojson }}{% endif %}"
        + STRIPS.replace("message.content | trim", "message.content + message.tool_calls | default('') | tojson"),
        "leaves out its 'tools'; give another template, or take them out of the row",
    ),
    "shows no answer": (
        STRIPS.replace("message.content | trim", "(message.content if message.content != 'a lamp' else '')"),
        "shows nothing of turn 3 (assistant)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_templates_that_refuse_or_lose_a_row(name: str) -> None:
    template, message = REFUSED[name]
    tokenizer = make(template)
    tools = [{"name": "look", "parameters": {"probe_argument": 1}}] if "tools" in name else None
    encoded = encode(tokenizer, {"messages": CHAT[:3], "tools": tools})
    ((row, said),) = encoded.bad
    assert row == 0
    assert message in said
    assert encoded.lengths.tolist() == encoded.ids.tolist() == []
    with pytest.raises(RecipeError, match=f"^rows.json, row 7: {re.escape(said)}"):
        Preparation(tokenizer).check(["rows.json, row 7"], encoded)


def test_a_blank_answer_is_not_the_fault_of_the_template() -> None:
    encoded = encode(make(STRIPS), {"messages": [CHAT[1], {"role": "assistant", "content": " \n"}]})
    assert encoded.bad == [(0, "turn 2 (assistant) is blank; there is nothing to learn from it")]


def test_templates_that_render_nothing() -> None:
    with pytest.raises(RecipeError, match=r"does not render a question and an answer \(TemplateError: no\)"):
        ChatTemplate(make("{{ raise_exception('no') }}"))
    with pytest.raises(RecipeError, match="has no chat template"):
        ChatTemplate(make(""))


def test_special_tokens_in_text_are_read_as_such_and_counted() -> None:
    tokenizer = of_case("phi3")
    tokenizer.add_tokens([_strip_right("<|sep|>")], special_tokens=True)
    rows = [{"messages": [CHAT[1], {"role": "assistant", "content": f"write {text} here"}]} for text in ("<|end|>", "")]
    rows += [{"messages": [{"role": "user", "content": "the <|sep|>"}, CHAT[2]]}]
    encoded = encode(tokenizer, *rows)
    assert spelled(tokenizer, encoded)[:2] == [["write <|end|> here<|end|>"], ["write  here<|end|>"]]
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert [ids.count(end) for ids, _ in samples(encoded)] == [3, 2, 2]
    assert noted(encoded) == {"special tokens in text": 2}


def _strip_right(text: str) -> Any:
    from tokenizers import AddedToken

    return AddedToken(text, rstrip=True, special=True)


# --- formats and marks -----------------------------------------------------------------------------

START, END = "<|im_start|>", "<|im_end|>"
ONE_TURN = f"{START}system\ns{END}\n{START}user\na{END}\n{START}assistant\n[b{END}]"
TWO_TURNS = f"{ONE_TURN}\n{START}user\nc{END}\n{START}assistant\n[d{END}]"
LAST_OF_TWO = TWO_TURNS.replace("[b<|im_end|>]", "b<|im_end|>")
ALL_OF_TWO = f"[{TWO_TURNS.replace('[', '').replace(']', '')}]"


def turns(*spoken: str, **marks: dict[str, Any]) -> list[dict[str, Any]]:
    """Turns of ``role:text``; marks are by their text."""
    pairs = [turn.split(":") for turn in spoken]
    return [{"role": role, "content": text, **marks.get(text, {})} for role, text in pairs]


MESSAGES = turns("system:s", "user:a", "assistant:b", "user:c", "assistant:d")
GPT = {"system": "system", "user": "human", "assistant": "gpt"}
TWO_TURN_ROWS: dict[str, dict[str, Any]] = {
    "alpaca": {"system": "s", "history": [["a", "b"]], "instruction": "c", "output": "d"},
    "sharegpt": {"conversations": [{"from": GPT[m["role"]], "value": m["content"]} for m in MESSAGES]},
    "messages": {"messages": MESSAGES},
}


def bracketed(tokenizer: Any, encoded: Encoded) -> list[str]:
    """The text of each sample, with what is supervised in brackets."""
    assert not encoded.bad
    texts = []
    for ids, labels in samples(encoded):
        text, at = "", 0
        for start, end in runs(labels):
            text += f"{tokenizer.decode(ids[at:start])}[{tokenizer.decode(ids[start:end])}]"
            at = end
        texts.append(text + tokenizer.decode(ids[at:]))
    return texts


@pytest.mark.parametrize("form", TWO_TURN_ROWS)
@pytest.mark.parametrize(("supervise", "text"), [("assistant", TWO_TURNS), ("last", LAST_OF_TWO), ("all", ALL_OF_TWO)])
def test_conversations_and_what_is_supervised(form: str, supervise: str, text: str) -> None:
    tokenizer = of_case("chatml")
    encoded = encode(tokenizer, TWO_TURN_ROWS[form], form=form, supervise=supervise)
    assert bracketed(tokenizer, encoded) == [text]
    assert encoded.rows.tolist() == [0]


PROMPT_AND_CHAT = {"prompt": MESSAGES[:4], "completion": MESSAGES[4:]}


@pytest.mark.parametrize(
    ("supervise", "text"), [("assistant", LAST_OF_TWO), ("last", LAST_OF_TWO), ("all", ALL_OF_TWO)]
)
def test_prompt_and_completion_of_messages(supervise: str, text: str) -> None:
    tokenizer = of_case("chatml")
    encoded = encode(tokenizer, PROMPT_AND_CHAT, form="prompt_completion", supervise=supervise)
    assert bracketed(tokenizer, encoded) == [text]


@pytest.mark.parametrize("supervise", ["assistant", "last", "all"])
def test_raw_text_is_supervised_whatever_is_asked_of_conversations(supervise: str) -> None:
    tokenizer = of_case("chatml")
    text = {"text": "the red\n书"}
    pair = {"prompt": "the red ", "completion": "book"}
    assert bracketed(tokenizer, encode(tokenizer, text, form="completion", supervise=supervise)) == [
        f"[the red\n书{END}]"
    ]
    encoded = encode(tokenizer, pair, form="prompt_completion", supervise=supervise)
    assert bracketed(tokenizer, encoded) == [f"the red [book{END}]"]
    prompt, answer = (tokenizer(pair[name])["input_ids"] for name in ("prompt", "completion"))
    assert samples(encoded) == [
        ([*prompt, *answer, 2], [*[IGNORE_INDEX] * len(prompt), *answer, 2]),
    ]


def test_token_ids_are_left_as_they_are() -> None:
    rows: list[dict[str, Any]] = [
        {"input_ids": [5, 6, 7]},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 9]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]},
        {"input_ids": [0, 5, 6, 7], "completion_mask": [0, 0, 1, 1], "attention_mask": [0, 1, 1, 1]},
        {"input_ids": [5, 999]},
        {"input_ids": [5, 6], "labels": [-100, -1]},
    ]
    tokenizer = of_case("chatml")
    encoded = encode(tokenizer, *rows, form="tokenized")
    assert samples(encoded) == [
        ([5, 6, 7], [5, 6, 7]),
        ([5, 6, 7], [-100, 6, 9]),
        ([5, 6, 7], [-100, -100, 7]),
        ([5, 6, 7], [-100, 6, 7]),
    ]
    last = len(tokenizer) - 1
    assert encoded.bad == [
        (4, f"its token ids reach from 5 to 999; those of the tokenizer are 0 to {last}"),
        (5, f"its token ids reach from -1 to 6; those of the tokenizer are 0 to {last}"),
    ]


MARKED: dict[str, tuple[dict[str, dict[str, Any]], str, str]] = {
    "train: false": ({"b": {"train": False}}, "assistant", LAST_OF_TWO),
    "weight: 0": ({"b": {"weight": 0}}, "assistant", LAST_OF_TWO),
    "weight: 1 on all": ({text: {"weight": 1} for text in "sabcd"}, "assistant", TWO_TURNS),
    "false on the last": ({"d": {"train": False}}, "assistant", ONE_TURN),
    "true on the first user turn": ({"a": {"train": True}}, "assistant", TWO_TURNS.replace(f"a{END}", f"[a{END}]")),
    "true on a later user turn": ({"c": {"train": True}}, "assistant", TWO_TURNS.replace(f"c{END}", f"[c{END}]")),
    "true on the system prompt": ({"s": {"train": True}}, "assistant", TWO_TURNS.replace(f"s{END}", f"[s{END}]")),
    "true on a user turn, last": ({"a": {"train": True}}, "last", LAST_OF_TWO),
    "true on a user turn, all": ({"a": {"train": True}}, "all", ALL_OF_TWO),
}


@pytest.mark.parametrize("name", MARKED)
def test_marks_of_single_turns(name: str) -> None:
    marks, supervise, text = MARKED[name]
    tokenizer = of_case("chatml")
    row = {"messages": [{**message, **marks.get(message["content"], {})} for message in MESSAGES]}
    assert bracketed(tokenizer, encode(tokenizer, row, supervise=supervise)) == [text]


@pytest.mark.parametrize(
    ("name", "opening"),
    [("qwen2.5", f"{START}system\nYou are Qwen.{END}\n{START}user\n"), ("vicuna", "USER: "), ("mistral", "<s>[INST] ")],
)
def test_a_supervised_question_where_no_text_can_stand_before_it(name: str, opening: str) -> None:
    tokenizer = of_case(name)
    chat = turns("user:and", "assistant:b", "user:<c", **{"and": {"train": True}, "<c": {"train": True}})
    encoded = encode(tokenizer, {"messages": chat})
    assert bracketed(tokenizer, encoded)[0].startswith(f"{opening}[and")
    assert "".join(map("".join, spelled(tokenizer, encoded))).count("<c") == 1
    assert noted(encoded).get("ends without answer", 0) == 0


@pytest.mark.parametrize("name", CASES)
def test_a_conversation_that_the_assistant_begins(name: str) -> None:
    tokenizer = of_case(name)
    chat = turns("assistant:a lamp", "user:under", "assistant:red")
    if name == "mistral":
        chat[0]["train"] = False
    encoded = encode(tokenizer, {"messages": chat})
    said = "".join(map("".join, spelled(tokenizer, encoded)))
    assert (said.count("a lamp"), said.count("red")) == (int(name != "mistral"), 1)
    ids, labels = samples(encoded)[-1]
    assert ids[: runs(labels)[-1][0]] == prompts(tokenizer, chat)[-1]


def test_a_mark_moves_with_the_system_prompt_of_the_recipe() -> None:
    tokenizer = of_case("chatml")
    row = {"messages": turns("user:a", "assistant:b", "user:c", "assistant:d", b={"train": False})}
    assert bracketed(tokenizer, encode(tokenizer, row, system="s")) == [LAST_OF_TWO]


def test_rows_without_supervised_turn_or_with_a_last_question() -> None:
    tokenizer = of_case("chatml")
    encoded = encode(
        tokenizer,
        {"messages": turns("user:a", "assistant:b", b={"train": False})},
        {"messages": [*MESSAGES, *turns("user:e")]},
        {"messages": turns("user:a", "assistant:b", b={"weight": 0})},
        supervise="last",
    )
    assert bracketed(tokenizer, encoded) == [LAST_OF_TWO]
    assert encoded.rows.tolist() == [1]
    assert noted(encoded) == {"nothing supervised": 2, "ends without answer": 1}


# --- tools -----------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "find", "description": "查", "parameters": {"type": "object"}}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOL_CHAT = [
    {"role": "user", "content": "the cup"},
    {"role": "assistant", "content": "", "tool_calls": [call("find", what="杯子")]},
    {"role": "tool", "content": 'is "red"'},
    {"role": "assistant", "content": "red"},
]
PARALLEL = [
    TOOL_CHAT[0],
    {"role": "assistant", "content": "under", "tool_calls": [call("find", what="杯子"), call("find", what="lamp")]},
    {"role": "tool", "content": "a"},
    {"role": "tool", "content": "b"},
    TOOL_CHAT[3],
]


def test_tools_as_qwen_writes_them() -> None:
    tokenizer = of_case("qwen2.5")
    encoded = encode(tokenizer, {"messages": PARALLEL, "tools": [TOOL]})
    tagged = [
        f'<tool_call>\n{{"name": "find", "arguments": {{"what": "{what}"}}}}\n</tool_call>' for what in ("杯子", "lamp")
    ]
    assert bracketed(tokenizer, encoded) == [
        f"{START}system\nYou are Qwen.\n\n# Tools\n\n<tools>\n{json.dumps(TOOL, ensure_ascii=False)}\n</tools>{END}\n"
        f"{START}user\nthe cup{END}\n{START}assistant\n[under\n{tagged[0]}\n{tagged[1]}{END}]\n"
        f"{START}user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>{END}\n"
        f"{START}assistant\n[red{END}]"
    ]
    before = [ids[:start] for ids, labels in samples(encoded) for start, _ in runs(labels)]
    assert before == prompts(tokenizer, PARALLEL, tools=[TOOL])
    assert noted(encoded) == {}


def test_arguments_may_be_json_in_a_string_and_sharegpt_has_roles_of_its_own() -> None:
    tokenizer = of_case("qwen2.5")
    openai = copy.deepcopy(TOOL_CHAT)
    openai[1]["tool_calls"][0]["function"]["arguments"] = '{"what": "杯子"}'
    openai[1]["content"] = None
    sharegpt = [
        {"from": "human", "value": "the cup"},
        {"from": "function_call", "value": '{"name": "find", "arguments": {"what": "杯子"}}'},
        {"from": "observation", "value": 'is "red"'},
        {"from": "gpt", "value": "red"},
    ]
    wanted = samples(encode(tokenizer, {"messages": TOOL_CHAT, "tools": [TOOL]}))
    assert samples(encode(tokenizer, {"messages": openai, "tools": [TOOL["function"]]})) == wanted
    row = {"conversations": sharegpt, "tools": json.dumps([TOOL])}
    assert samples(encode(tokenizer, row, form="sharegpt")) == wanted


def test_tools_as_llama_writes_them() -> None:
    tokenizer = of_case("llama3.1")
    encoded = encode(tokenizer, {"messages": TOOL_CHAT, "tools": [TOOL]})
    assert spelled(tokenizer, encoded) == [
        ['{"name": "find", "parameters": {"what": "杯子"}}<|eot_id|>', "red<|eot_id|>"]
    ]
    ((ids, _),) = samples(encoded)
    assert '<|start_header_id|>ipython<|end_header_id|>\n\n{"output": "is \\"red\\""}<|eot_id|>' in tokenizer.decode(
        ids
    )
    before = [ids[:start] for ids, labels in samples(encoded) for start, _ in runs(labels)]
    assert before == prompts(tokenizer, TOOL_CHAT, tools=[TOOL])
    assert noted(encoded) == {}


def test_what_a_template_leaves_out_beside_a_call_is_counted_and_parallel_calls_may_be_refused() -> None:
    tokenizer, said = of_case("llama3.1"), copy.deepcopy(TOOL_CHAT)
    said[1]["content"] = "under"
    encoded = encode(tokenizer, {"messages": said, "tools": [TOOL]}, {"messages": PARALLEL, "tools": [TOOL]})
    assert noted(encoded) == {"answer left out in part": 1}
    ((row, message),) = encoded.bad
    assert (row, message.partition("render it ")[2]) == (
        1,
        "(TemplateError: This model only supports single tool-calls at once!)",
    )


@pytest.mark.parametrize("name", ["chatml", "gemma", "vicuna"])
def test_tools_are_spelled_out_where_a_template_shows_none(name: str) -> None:
    tokenizer = of_case(name)
    encoded = encode(tokenizer, {"messages": PARALLEL, "tools": [TOOL]})
    end, opening = {"chatml": (END, ""), "gemma": ("<end_of_turn>", ""), "vicuna": ("</s>", " ")}[name]
    tagged = [
        f'<tool_call>\n{{"name": "find", "arguments": {{"what": "{what}"}}}}\n</tool_call>' for what in ("杯子", "lamp")
    ]
    said = [f"{opening}under\n{tagged[0]}\n{tagged[1]}{end}", f"{opening}red{end}"]
    assert [text for sample in spelled(tokenizer, encoded) for text in sample] == said
    text = tokenizer.decode(samples(encoded)[-1][0])
    assert "<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>" in text
    assert f"<tools>\n{json.dumps(TOOL, ensure_ascii=False)}\n</tools>\n\nthe cup" in text
    assert noted(encoded)["tools spelled out"] == 1


def test_spelled_out_functions_follow_a_system_prompt_and_are_never_in_an_answer() -> None:
    tokenizer = of_case("chatml")
    with_system = [{"role": "system", "content": "s"}, *TOOL_CHAT]
    greeting = [{"role": "assistant", "content": "a"}, *TOOL_CHAT]
    encoded = encode(tokenizer, *({"messages": chat, "tools": [TOOL]} for chat in (with_system, greeting)))
    first, second = bracketed(tokenizer, encoded)
    listing = f"<tools>\n{json.dumps(TOOL, ensure_ascii=False)}\n</tools>{END}\n"
    assert first.startswith(f"{START}system\ns\n\nYou may call the functions below.")
    assert f"{listing}{START}user\nthe cup{END}" in first
    assert second.startswith(f"{START}system\nYou may call the functions below.")
    assert f"{listing}{START}assistant\n[a{END}]\n{START}user\nthe cup{END}" in second


def test_nothing_is_counted_of_a_row_that_is_refused() -> None:
    tokenizer = make(REFUSED["drops the system text"][0])
    encoded = encode(tokenizer, {"messages": [CHAT[0], *TOOL_CHAT]}, {"messages": TOOL_CHAT})
    assert [row for row, _ in encoded.bad] == [0]
    assert noted(encoded) == {"tools spelled out": 1}


def test_marks_stay_with_their_turns_when_tools_are_spelled_out() -> None:
    tokenizer = of_case("chatml")
    chat = copy.deepcopy([*PARALLEL, *turns("user:c", "assistant:d")])
    chat[4]["train"], chat[5]["train"] = False, True
    encoded = encode(tokenizer, {"messages": chat})
    said = spelled(tokenizer, encoded)[0]
    assert said[1:] == [f"c{END}", f"d{END}"]
    assert noted(encoded) == {"tools spelled out": 1}
