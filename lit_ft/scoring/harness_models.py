"""Models for lm-evaluation-harness: an opened one in this process, or one behind OpenAI's HTTP interface.

The harness moves the white space at the end of a prompt into the answer, and a chat template's prompt ends in white
space (ChatML: a line break). Log-likelihoods would be those of other tokens than training has: rendered prompts are
encoded here as training encodes them.
"""

import copy
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from lit_ft.data.text.chat_template import ChatTemplate
from lit_ft.data.tokens.segment_encoder import TextEncoder
from lit_ft.errors import RecipeError
from lit_ft.inference.openai.client import Lacking, OpenAIClient
from lit_ft.inference.opening import OpenedModel
from lit_ft.model.generation import stop_ids
from lit_ft.packed_batch import IGNORE_INDEX

T = TypeVar("T")
R = TypeVar("R")
_NO_LIMIT = 10**9
"""Values of a tokenizer's ``model_max_length`` from here on mean that it has none."""
Turns = list[dict[str, str]]
Scored = list[tuple[float, bool]]
"""Log-likelihood of each answer, and whether it is the greedy one."""


class PromptEncoder:
    """Encoder of rendered prompts and their answers, as in training."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate) -> None:
        """Prepare the tokenizer, which is changed in place."""
        self.template, self._encoder = template, TextEncoder(tokenizer)

    def __call__(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Token ids of a prompt and of its answer."""
        ids, labels, _ = self._encoder.encode([[(prompt, False), (answer, True)]])
        answered = np.flatnonzero(labels != IGNORE_INDEX)
        border = int(answered[0]) if len(answered) else len(ids)
        return ids[:border].tolist(), ids[border:].tolist()

    def render(self, turns: Turns, generation: bool) -> str:
        """Prompt of a conversation; without ``generation`` its last turn stays open, as a beginning of the answer."""
        if generation:
            return self.template.render(turns, generation=True)
        # The harness wants the text up to the end of the last turn's content.
        text, last = self.template.render(turns), turns[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]


class TrainedLM(HFLM):
    """Opened model; with a chat template, prompts are rendered and encoded as in training."""

    def __init__(self, opened: OpenedModel, batch_size: int, has_chat: bool) -> None:
        """Take the model.

        Args:
            opened: model, with its adapter or without.
            batch_size: requests of a forward pass.
            has_chat: whether tasks are put into the chat template.
        """
        tokenizer = copy.deepcopy(opened.tokenizer)  # the harness sets its padding token
        super().__init__(
            pretrained=opened.model,
            backend="causal",
            tokenizer=tokenizer,
            batch_size=batch_size,
            add_bos_token=False if has_chat else None,  # the template writes it
        )
        self._stops = stop_ids(opened.base, opened.tokenizer)
        self._prompts = PromptEncoder(tokenizer, opened.template) if has_chat else None

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if self._prompts is None:
            return super()._encode_pair(context, continuation)
        return self._prompts(context, continuation)

    def apply_chat_template(self, chat_history: Turns, add_generation_prompt: bool = True) -> str:
        """Prompt of a conversation, by the run's chat template."""
        assert self._prompts is not None, "tasks are put into the template"
        return self._prompts.render(chat_history, add_generation_prompt)

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **generation_kwargs: Any) -> Any:
        # As in `predict`: a base model's own end token may never follow a turn.
        return super()._model_generate(context, max_length, stop, eos_token_id=self._stops or None, **generation_kwargs)


class ServedLM(TemplateLM):
    """Model behind OpenAI's HTTP interface, asked with tokens, or by conversations."""

    def __init__(
        self,
        client: OpenAIClient,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate | None,
        at_once: int,
        api: Literal["completions", "chat"],
    ) -> None:
        """Set server, model and interface.

        Args:
            client: connection to the server.
            model: name of the model there.
            tokenizer: its tokenizer.
            template: chat template that tasks are put into; None for none.
            at_once: requests that are sent at the same time.
            api: ``completions`` sends tokens; ``chat`` sends conversations, and the server renders them.
        """
        super().__init__()
        self.tokenizer = tokenizer
        most = tokenizer.model_max_length
        self.max_length = most if most < _NO_LIMIT else 2048
        self._client, self._model, self._at_once, self._api = client, model, at_once, api
        self._has_chat = template is not None
        self._prompts = None if template is None else PromptEncoder(tokenizer, template)

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Token before a text that has no prompt."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer."""
        return str(self.tokenizer.name_or_path)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Chat template of the tokenizer."""
        return str(self.tokenizer.chat_template)

    def apply_chat_template(self, chat_history: Turns, add_generation_prompt: bool = True) -> str:
        """Prompt of a conversation; for the server's own template, the conversation as JSON."""
        if self._api == "chat":
            return json.dumps(chat_history)
        assert self._prompts is not None, "tasks are put into the template"
        return self._prompts.render(chat_history, add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Token ids of a text."""
        special = self._prompts is None if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer(string, add_special_tokens=special)["input_ids"])

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if self._prompts is None:
            return super()._encode_pair(context, continuation)
        return self._prompts(context, continuation)

    @property
    def backend(self) -> str:
        """Kind of the model, which the harness's own encoding asks for."""
        return "causal"

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> Scored:
        """Score answers.

        Raises:
            RecipeError: the server is asked by conversations, which have no log-probabilities of given answers.
        """
        if self._api == "chat":
            raise RecipeError(
                f"the task {requests[0].task_name!r} needs log-probabilities of given answers, which "
                "/v1/chat/completions does not give; take --api completions, or a task that generates"
            )
        return super().loglikelihood(requests, disable_tqdm)

    def _loglikelihood_tokens(self, requests: list[Any], disable_tqdm: bool = False, **_: object) -> Scored:
        pairs = [(prompt, answer) for _, prompt, answer in requests]
        if too_long := sum(len(prompt) + len(answer) > self.max_length for prompt, answer in pairs):
            rank_zero_warn(
                f"{too_long:,} of {len(pairs):,} texts longer than {self.max_length:,} tokens, the tokenizer's "
                "model_max_length; taken without the beginning of the prompt"
            )
        return self._each(self._score, pairs)

    def _score(self, pair: tuple[list[int], list[int]]) -> tuple[float, bool]:
        prompt, answer = pair
        ids = [*prompt, *answer][-self.max_length :]
        own, best = (values[len(values) - len(answer) :] for values in self._client.choices(self._model, ids))
        return sum(own), all(one >= top for one, top in zip(own, best, strict=True))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows of ``max_length`` tokens."""
        if self._api == "chat":
            self.loglikelihood(requests)
        sums = []
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length - 1, context_len=1
            )
            scores = self._loglikelihood_tokens([(None, *make_disjoint_window(window)) for window in windows])
            sums.append(sum(score for score, _ in scores))
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate answers."""
        # Tokenizers are not made for several threads.
        asked = [(self._prompt(request.args[0]), request.args[1]) for request in requests]
        return self._each(self._generate, asked)

    def _prompt(self, text: str) -> list[int] | Turns:
        if self._api != "chat":
            return self.tok_encode(text)
        is_conversation = self._has_chat and text.startswith("[{")
        return json.loads(text) if is_conversation else [{"role": "user", "content": text}]

    def _generate(self, request: tuple[list[int] | Turns, dict[str, Any]]) -> str:
        prompt, given = request
        options: dict[str, Any] = dict(normalize_gen_kwargs(given))
        stops = handle_stop_sequences(options.pop("until", None), eos=None)
        options.pop("do_sample", None)  # the temperature says it
        options["max_tokens"] = options.pop("max_gen_toks")
        options |= {"stop": stops} if stops else {}
        send: Callable[..., str] = self._client.chat if self._api == "chat" else self._client.completion
        return postprocess_generated_text(send(self._model, prompt, **options), stops, None)

    def _each(self, ask: Callable[[T], R], requests: Sequence[T]) -> list[R]:
        """Results of requests, several at once.

        Raises:
            RecipeError: the server does not give what is asked.
        """
        with ThreadPoolExecutor(self._at_once) as pool:
            return list(_refused(self._client.url, pool.map(ask, requests)))


def _refused(url: str, results: Iterable[R]) -> Iterable[R]:
    try:
        yield from results
    except Lacking as error:
        raise RecipeError(f"{url} does not give what the task needs: {error}") from error
