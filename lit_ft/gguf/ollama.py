"""Ollama's Modelfile: files, stop strings, and the chat template if its equivalent in Go is known."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lit_ft.data.text.chat_template import ChatTemplate
from lit_ft.errors import RecipeError

Messages = Sequence[dict[str, str]]
_PROBE: Messages = (
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "r"},
)


@dataclass(frozen=True)
class GoTemplate:
    """A chat template in the language of Ollama."""

    name: str
    text: str
    """Go template; the BOS token is left to llama.cpp, which puts it before a prompt where the model has one there."""
    turn: Callable[[str, str], str]
    """What it writes for a role and a content."""
    opening: str
    """What it writes before an answer."""

    def prompt(self, messages: Messages) -> str:
        """Text of a conversation up to an answer."""
        return "".join(self.turn(one["role"], one["content"]) for one in messages) + self.opening


GO_TEMPLATES = (
    GoTemplate(
        "ChatML",
        "{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n",
        lambda role, content: f"<|im_start|>{role}\n{content}<|im_end|>\n",
        "<|im_start|>assistant\n",
    ),
    GoTemplate(
        "Llama 3",
        "{{ range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>\n\n{{ .Content }}<|eot_id|>{{ end }}"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        lambda role, content: f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
)
"""Chat templates that are known in both languages."""


def ollama_name(name: str) -> str:
    """Name of a model as Ollama allows it: Latin letters, digits, ``.``, ``_`` and ``-``, the last three within."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("._-") or "model"


def modelfile(model: str | None, adapter: str | None, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> str:
    """Text of a Modelfile.

    Args:
        model: file of the model; None where the user has one.
        adapter: file of the LoRA adapter; None without.
        tokenizer: tokenizer with the chat template.
        ends: tokens that end an answer.
    """
    lines = ["# Not run here: Ollama's own check is `ollama create NAME -f Modelfile`."]
    if model is None:
        lines += ["# Put the GGUF file, or Ollama's name, of the base model here.", "FROM ./base.gguf"]
    else:
        lines += [f"FROM ./{model}"]
    lines += [f"ADAPTER ./{adapter}"] if adapter is not None else []
    lines += [f'PARAMETER stop "{tokenizer.convert_ids_to_tokens(end)}"' for end in ends]
    if not tokenizer.chat_template:
        return "\n".join(lines) + "\n"
    template, system = go_template(tokenizer)
    if template is None:
        lines.append("# TEMPLATE is left out: the chat template is none of those that lit_ft has in Go's language.")
        return "\n".join(lines) + "\n"
    lines += [f'SYSTEM """{system}"""'] if system else []
    return "\n".join([*lines, f'TEMPLATE """{template.text}"""']) + "\n"


def go_template(tokenizer: PreTrainedTokenizerBase) -> tuple[GoTemplate | None, str]:
    """Go template that renders like the tokenizer's chat template, and the default system prompt of the latter."""
    template, bos = ChatTemplate(tokenizer), tokenizer.bos_token or ""

    def rendered(messages: Messages) -> str | None:
        try:
            return template.render(list(messages), generation=True).removeprefix(bos)
        except RecipeError:
            raise
        except Exception:  # a template may refuse, with any exception, a system prompt for example
            return None

    for known in GO_TEMPLATES:
        if rendered(_PROBE) != known.prompt(_PROBE):
            continue
        alone, question = rendered(_PROBE[1:2]), known.prompt(_PROBE[1:2])
        if alone == question:
            return known, ""
        before, after = known.turn("system", "\0").split("\0")
        if alone is not None and alone.startswith(before) and alone.endswith(after + question):
            return known, alone.removeprefix(before).removesuffix(after + question)
    return None, ""
