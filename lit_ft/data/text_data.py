"""The LightningDataModule: a file of conversations or text in, padding-free rows out."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from lit_ft import process
from lit_ft.data.batching import BatchPlan, RowLoader
from lit_ft.data.formats import Conversation, to_conversations
from lit_ft.data.rendering import check_chat_template, ends_turn, prompt_text, set_chat_template, tokenize
from lit_ft.data.samples import Overlong, Samples, fit_to_length
from lit_ft.data.sources import read_rows
from lit_ft.errors import RecipeError


@dataclass(frozen=True)
class Split:
    """Conversations and their tokens, index by index."""

    conversations: list[Conversation]
    samples: Samples


class TextDataModule(LightningDataModule):
    """Instruction data or raw text from JSON files.

    Everything is read, checked and tokenised before any weights are loaded. What is cut, dropped or
    skipped is said in a line.
    """

    def __init__(
        self,
        path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        val_fraction: float = 0.0,
        format: Literal["auto", "alpaca", "completion"] = "auto",
        system: str | None = None,
        chat_template: str | None = None,
        max_length: int | None = 2048,
        overlong: Overlong = "truncate",
        micro_batch_size: int = 1,
        join_micro_batches: bool = True,
        packing: int | bool | Literal["off"] | None = None,
        shuffle: bool = True,
        num_workers: int = 0,
    ) -> None:
        """Say where the data is and how it is dealt out.

        Args:
            path: training data, a .json (list of objects) or .jsonl file; not needed to validate or test.
            val_path: validation data; also what `test` and `predict` use when test_path is not given.
            test_path: data for `test` and `predict`.
            val_fraction: share of the training rows split off for validation, 0 to 1, when val_path is not given.
            format: columns of a row; auto finds it (alpaca: instruction, input, output; completion: text).
            system: system prompt for rows that bring none of their own.
            chat_template: Jinja text, or a file of it, in place of the tokenizer's own.
            max_length: longest sample, in tokens; null for no limit.
            overlong: what happens to longer samples: truncate (cut at the end), drop, or error.
            micro_batch_size: samples (with packing: packed rows) per device and forward pass.
            join_micro_batches: run micro-batches of one optimiser step together while they fit in
                micro_batch_size x max_length tokens, the memory that the recipe allows. Same numbers, fewer passes.
            packing: token budget of a packed row, or off. A sample longer than it is an error.
            shuffle: new order each epoch, from the seed.
            num_workers: processes that assemble rows; 0 is right unless rows are huge.
        """
        super().__init__()
        if not 0 <= val_fraction < 1:
            raise RecipeError(f"data.val_fraction={val_fraction} must be at least 0 and below 1, e.g. 0.05")
        if packing is True:
            raise RecipeError("data.packing=true says no size; give the token budget of a row, e.g. 2048, or off")
        if micro_batch_size < 1:
            raise RecipeError(f"data.micro_batch_size={micro_batch_size} must be 1 or more")
        if val_path is not None and val_fraction:
            raise RecipeError(f"data.val_path={val_path!r} and data.val_fraction={val_fraction} exclude each other")
        self.path, self.val_path, self.test_path = path, val_path, test_path
        self.val_fraction, self.format, self.system = val_fraction, format, system
        self.chat_template = chat_template
        self.max_length, self.overlong = max_length, overlong
        self.packing = packing if isinstance(packing, int) and packing else None  # YAML reads off as false
        self.micro_batch_size, self.join_micro_batches = micro_batch_size, join_micro_batches
        self.shuffle, self.num_workers = shuffle, num_workers
        self.splits: dict[str, Split] = {}
        self._train_loader: RowLoader | None = None
        self._place: dict[str, Any] = {}

    def load(self, tokenizer: PreTrainedTokenizerBase | None = None, stage: str = "fit") -> None:
        """Read, check and tokenise what a stage needs; a second call does nothing.

        Args:
            tokenizer: the model's.
            stage: fit, validate, test or predict.

        Raises:
            RecipeError: a file, a row or the tokenizer is not right.
        """
        if tokenizer is None:
            raise RecipeError("TextDataModule needs a tokenizer: the model's class must have it as `tokenizer`")
        self._tokenizer = tokenizer
        if stage == "fit" and "train" not in self.splits:
            self._load_training(tokenizer)
        elif stage == "validate" and "val" not in self.splits:
            self._load_training(tokenizer) if self.val_fraction else self._load_split("val", tokenizer)
            if "val" not in self.splits:
                raise RecipeError("there is nothing to validate on; set data.val_path or data.val_fraction")
        elif stage in ("test", "predict") and "test" not in self.splits:
            self._load_split("test", tokenizer)

    def _load_training(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if self.path is None:
            raise RecipeError("data.path is not set; give a .json or .jsonl file with --data.path FILE")
        conversations = self._read(self.path, "data.path")
        held_out: set[int] = set()
        if self.val_fraction:
            count = max(1, round(len(conversations) * self.val_fraction))
            if count >= len(conversations):
                raise RecipeError(
                    f"data.val_fraction={self.val_fraction} of {len(conversations)} rows leaves none to train on; "
                    "lower it"
                )
            held_out = set(np.random.default_rng(process.seed()).permutation(len(conversations))[:count].tolist())
            self.splits["val"] = self._tokenize([conversations[i] for i in sorted(held_out)], self.path, tokenizer)
        elif self.val_path is not None:
            self._load_split("val", tokenizer)
        training = [row for i, row in enumerate(conversations) if i not in held_out]
        self.splits["train"] = self._tokenize(training, self.path, tokenizer)
        if self.packing is not None and (longest := int(self.splits["train"].samples.lengths.max())) > self.packing:
            raise RecipeError(
                f"data.packing={self.packing} tokens cannot hold the longest sample of {longest}; "
                f"set it to {longest} or more, or data.max_length to {self.packing}"
            )

    def _load_split(self, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        path, option = self.val_path, "data.val_path"
        if name == "test" and self.test_path is not None:
            path, option = self.test_path, "data.test_path"
        if path is None:
            raise RecipeError(f"there is no data to {name} on; set data.{name}_path or data.val_path")
        self.splits[name] = self._tokenize(self._read(path, option), path, tokenizer)

    def _read(self, path: str, option: str) -> list[Conversation]:
        return to_conversations(read_rows(path, option), path, self.format, self.system)

    def _tokenize(self, conversations: list[Conversation], path: str, tokenizer: PreTrainedTokenizerBase) -> Split:
        set_chat_template(tokenizer, self.chat_template)
        first = conversations[0]
        if not isinstance(first, str):
            check_chat_template(tokenizer)
            if not ends_turn(first, tokenizer):
                rank_zero_warn(
                    f"the chat template of {tokenizer.name_or_path!r} closes the assistant's turn with no special "
                    "token: the model will not learn to stop. Give another one with data.chat_template"
                )
        tokenized = [tokenize(conversation, tokenizer) for conversation in conversations]
        kept, samples, lines = fit_to_length(tokenized, self.max_length, self.overlong, path)
        for line in lines:
            rank_zero_info(line)
        return Split([conversations[i] for i in kept], samples)

    def setup(self, stage: str) -> None:
        """Load what the stage needs, unless that was done before."""
        module = getattr(self.trainer, "lightning_module", None)
        self.load(getattr(module, "tokenizer", None), stage)

    @property
    def token_budget(self) -> int | None:
        """Most tokens of a micro-batch that the recipe allows; None without a limit."""
        per_unit = self.packing if self.packing is not None else self.max_length
        return None if per_unit is None else per_unit * self.micro_batch_size

    def train_dataloader(self) -> RowLoader:
        """Micro-batches of this rank, which know their optimiser window."""
        trainer: Any = self.trainer
        plan = BatchPlan(
            micro_batch_size=self.micro_batch_size,
            packing=self.packing,
            token_budget=self.token_budget if self.join_micro_batches else None,
            shuffle=self.shuffle,
            seed=process.seed(),
            replicas=process.replica(self.trainer)[0],
        )
        limit = trainer.overfit_batches or trainer.limit_train_batches
        self._train_loader = self._loader("train", plan, limit, lambda: trainer.accumulate_grad_batches)
        if self._place:
            self._train_loader.load_state_dict(self._place)
        return self._train_loader

    def state_dict(self) -> dict[str, Any]:
        """The place in the training data."""
        return self._train_loader.state_dict() if self._train_loader is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved place.

        Lightning hands loaders their state too, but not where a schedule asked for
        ``trainer.estimated_stepping_batches`` before: then the loader was set up too early.
        """
        self._place = state_dict
        if self._train_loader is not None and state_dict:
            self._train_loader.load_state_dict(state_dict)

    def val_dataloader(self) -> RowLoader | tuple[()]:
        """Validation rows, each sample once, in rows of up to the token budget."""
        return self._evaluation_loader("val", "limit_val_batches") if "val" in self.splits else ()

    def test_dataloader(self) -> RowLoader:
        """Test rows, each sample once."""
        return self._evaluation_loader("test", "limit_test_batches")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Prompts and expected answers, ``micro_batch_size`` a batch; Lightning deals them out to the ranks."""
        conversations = [c for c in self.splits["test"].conversations if not isinstance(c, str)]
        prompts = [
            {"prompt": prompt_text(messages[:-1], self._tokenizer), "expected": messages[-1]["content"]}
            for messages in conversations
        ]
        dataset: Any = prompts  # a list is a map-style data set
        return DataLoader(dataset, batch_size=self.micro_batch_size, collate_fn=list)

    def _evaluation_loader(self, split: str, limit: str) -> RowLoader:
        samples = self.splits[split].samples
        # No gradients, no optimiser step: rows may hold as many samples as the memory of a training row.
        budget = self.token_budget
        units = None if budget is None else max(budget, int(samples.lengths.max()))
        size = self.micro_batch_size if units is None else 1
        plan = BatchPlan(micro_batch_size=size, packing=units, replicas=process.replica(self.trainer)[0])
        return self._loader(split, plan, getattr(self.trainer, limit))

    def _loader(self, split: str, plan: BatchPlan, limit: int | float, accumulate: Any = lambda: 1) -> RowLoader:
        assert self.trainer is not None
        return RowLoader(
            self.splits[split].samples,
            plan,
            replica=process.replica(self.trainer)[1],
            accumulate=accumulate,
            limit=limit,
            num_workers=self.num_workers,
            pin_memory=self.trainer.strategy.root_device.type == "cuda",
        )
