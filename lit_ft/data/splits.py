"""Data sets of training, validation and test, which are read, checked and tokenized when a stage needs them."""

from collections import UserDict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.output.quantities import as_count
from transformers import PreTrainedTokenizerBase

from lit_ft import process
from lit_ft.data.questions import asked_by, questions_of
from lit_ft.data.text.chat_template import set_chat_template
from lit_ft.data.text.formats import Chat, Text, good_answer_of
from lit_ft.data.text.rendering import expected_answer, prompt_of, through_last_supervised_answer
from lit_ft.data.text.sources import RawRow, Source, shared_content
from lit_ft.data.tokens.preparation import Preparation, Prepared
from lit_ft.data.tokens.samples import Samples, held_out_samples, join
from lit_ft.data.tokens.tokenization import Tokenization
from lit_ft.errors import BadRow, RecipeError
from lit_ft.packed_batch import RowValues
from lit_ft.protocols import Question, RowNeeds


class DataSplits(UserDict[str, Samples]):
    """Tokenized samples by split (train, val, test), of those splits that were read."""

    def __init__(
        self,
        sources: dict[str, list[Source]],
        named: set[str],
        val_fraction: float,
        preparation: Preparation,
        chat_template: str | None,
    ) -> None:
        """Set the sources; nothing is read yet.

        Args:
            sources: data sets of each split; test falls back on val.
            named: splits whose sources have loss curves of their own.
            val_fraction: fraction of each training source's rows that is held out for validation, 0 to 1.
            preparation: treatment of rows; it gets its tokenizer by ``use``.
            chat_template: replacement for the tokenizer's chat template; None keeps that.
        """
        super().__init__()
        self.sources, self.preparation = sources, preparation
        self.prepared: dict[str, list[Prepared]] = {}
        """Tokenized sources by split."""
        self._prompts: dict[str, list[dict[str, str]]] = {}
        self._needs: dict[str, RowNeeds] = {}
        """What ``read_values`` has read, by split."""
        self._named, self._val_fraction, self._chat_template = named, val_fraction, chat_template

    def check_prompts(self) -> None:
        """Refuse answers without a prompt, and cut ones, where the model answers prompts and is compared with them.

        Raises:
            RecipeError: there is one; the message names its row.
        """
        for split, samples in self.items():
            if cut := sum(prepared.notes["truncated"] for prepared in self.prepared[split]):
                raise RecipeError(
                    f"data.overlong={self.preparation.overlong}: data.max_length={self.preparation.max_length} cuts "
                    f"{cut:,} of {as_count(len(samples), 'known answer')} of {split}, whose prompts the model answers; "
                    "set data.overlong=drop, or data.max_length higher"
                )
            bare = np.flatnonzero(samples.supervised >= samples.lengths - 1)  # the first token is never a target
            if len(bare):
                source = self.prepared[split][samples.source[bare[0]]].source
                raise RecipeError(
                    f"{source.path}: row {samples.rows[bare[0]] + 1:,} is supervised from its second token on "
                    f"({len(bare):,} of {len(samples):,} samples of {split}), and the model answers prompts: it has no "
                    "prompt; give conversations or instructions, and leave data.supervise=all out"
                )

    def notes_on_judgments(self) -> list[str]:
        """Line that says so where all unpaired answers of the training data are judged alike; else none."""
        samples = self["train"]
        if not samples.is_unpaired or len(np.unique(samples.is_rejected)) > 1:
            return []
        return [
            f"data: all {as_count(len(samples), 'answer')} of the training data are judged alike "
            f"({samples.judgments}), and a model learns from both kinds; give both, true for a good answer and false "
            "for a bad one"
        ]

    def find_partners(self) -> None:
        """Find for each answer one to another prompt of its split, which the model needs beside it.

        Raises:
            RecipeError: all answers of a split are to one prompt.
        """
        for split, samples in self.items():
            try:
                self[split] = samples.with_partners()
            except ValueError as error:
                raise RecipeError(
                    f"data: all answers of {split} ({as_count(len(samples), samples.kind)}) are to one prompt, and "
                    "model.objective needs answers to others, by which it sees how far the model is from its "
                    "reference; give rows of more prompts, or take lit_ft.DPO with pairs"
                ) from error

    def take_rows(self, takes_questions: bool, keeps_ending: bool) -> bool:
        """Set which rows are taken and how they end; returns whether that changes, so that what was read is forgotten.

        Args:
            takes_questions: whether rows may lack their answers.
            keeps_ending: whether conversations end as the chat template ends them.
        """
        taken = replace(self.preparation, takes_questions=takes_questions, keeps_ending=keeps_ending)
        if taken == self.preparation:
            return False
        self.preparation = taken
        for read in (self.data, self.prepared, self._prompts, self._needs):
            read.clear()
        return True

    def read_values(self, needs: RowNeeds) -> None:
        """Read what rewards need of the rows of all splits that were read; each file is read once more.

        Raises:
            RecipeError: no row of a split's sources has a column that they name, or a row is no conversation.
        """
        for split, samples in self.items():
            if self._needs.get(split) == needs:
                continue
            values, present = list[dict[int, RowValues]](), set[str]()
            for number, prepared in enumerate(self.prepared[split]):
                values.append(of_source := {})
                tokenization = self.preparation.tokenization(prepared.source)
                chosen = set(samples.rows[samples.source == number].tolist())
                for row_number, (location, row) in enumerate(prepared.source.rows()):
                    if isinstance(row, BadRow):
                        continue
                    present |= {name for name, value in row.items() if value is not None}
                    if row_number in chosen:
                        of_source[row_number] = self._values(row, location, tokenization, needs)
            if missing := [name for name in needs.columns if name not in present]:
                raise RecipeError(
                    f"model.rewards: {needs.columns[missing[0]]} reads the column {missing[0]!r}, which no row of the "
                    f"data of {split} has; the columns are {', '.join(sorted(present)) or 'none'}"
                )
            self[split], self._needs[split] = replace(samples, values=values), needs

    @staticmethod
    def _values(row: RawRow, location: str, tokenization: Tokenization, needs: RowNeeds) -> RowValues:
        values = RowValues({name: row.get(name) for name in needs.columns}, has_answer=tokenization.has_answer(row))
        if needs.messages is None:
            return values
        example = tokenization.example(row)
        chat = through_last_supervised_answer(example, tokenization.supervise) if isinstance(example, Chat) else None
        if chat is None:
            raise RecipeError(
                f"model.rewards: {needs.messages} reads the turns of conversations, and {location} is no "
                "conversation; give data with turns, or take another reward"
            )
        return values._replace(messages=chat.messages[:-1], tools=chat.tools)

    def has_known_answers(self, split: str) -> bool:
        """Whether any sample of a split has a known answer; all have, unless the rewards allow for others."""
        values = self[split].values if split in self else None
        return values is None or any(row.has_answer for of_source in values for row in of_source.values())

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer that reads the rows, with the data's chat template."""
        assert self.preparation.tokenizer is not None, "TextDataModule.load sets it"
        return self.preparation.tokenizer

    @property
    def validates(self) -> bool:
        """Whether there is validation data."""
        return bool(self.sources["val"] or self._val_fraction)

    @property
    def has_questions(self) -> bool:
        """Whether `predict` has rows to answer."""
        asked = self.sources["test"] or self.sources["val"] or (self.sources["train"] if self._val_fraction else [])
        return any(map(self._may_hold_conversations, asked))

    def _may_hold_conversations(self, source: Source) -> bool:
        is_indexed = source.index_prefix is not None
        return not is_indexed and self.preparation.tokenization(source).format not in ("completion", "tokenized")

    def check_options_of_conversations(self) -> None:
        """Refuse options of conversations where there are none, but raw text or token ids alone.

        Raises:
            RecipeError: one is given for a source without conversations, or for all of the data, which has none.
        """
        every = [source for sources in self.sources.values() for source in sources]
        vain = [one for one in every if one.system and not self._may_hold_conversations(one)]
        given = [f"{source.path}: system={source.system!r}" for source in vain]
        if (ours := self.preparation.of_conversations) and not any(map(self._may_hold_conversations, every)):
            given += [f"data.{name}={value!r}" for name, value in ours.items()]
        if given:
            raise RecipeError(
                f"{given[0]} has no effect on raw text or token ids, and there are no conversations; leave it out"
            )

    @property
    def longest_sample(self) -> int | None:
        """Tokens of the longest sample that was read; None if there is none, as with streaming."""
        return max((samples.longest for samples in self.values() if len(samples)), default=None)

    def use(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read rows with this tokenizer, which gets the data's chat template and its options."""
        if self.preparation.tokenizer is not tokenizer:
            set_chat_template(tokenizer, self._chat_template, self.preparation.template_options)
            self.preparation = replace(self.preparation, tokenizer=tokenizer)

    def read(self, split: str) -> None:
        """Read, check and tokenize a split, and print how many of its rows were truncated, dropped or skipped.

        Raises:
            RecipeError: the split has no data, or a file or a row cannot be used.
        """
        sources = self.sources[split] or (self.sources["val"] if split == "test" else [])
        if not sources:
            other = "data.val_fraction" if split == "val" else "data.val_path"
            raise RecipeError(f"there is no data to {_VERBS[split]} on; set data.{split}_path or {other}")
        self.prepared[split] = [self.preparation.prepare(source) for source in sources]
        for line in (line for prepared in self.prepared[split] for line in prepared.lines):
            rank_zero_info(line)
        self[split] = join([prepared.arrays for prepared in self.prepared[split]], self.names(split))

    def hold_out(self) -> None:
        """Take a fraction of the rows out of the training data for validation, and print how many."""
        train, paths = self["train"], [source.path for source in self.sources["train"]]
        held_out, counts, shared = held_out_samples(train, self._val_fraction, process.seed(), paths)
        for path, (count, rows) in zip(paths, counts, strict=True):
            rank_zero_info(f"{path}: {count:,} of {as_count(rows, 'row')} for validation")
        if shared:
            what = "answer prompts of several sources, which" if train.has_pairs else "are in several sources, and"
            held = as_count(sum(count for count, _ in counts), "row")
            rank_zero_info(f"data: {shared:,} of these {held} {what} are held out of each")
        self["val"] = replace(train.take(held_out), names=self.names("val"))
        self.prepared["val"] = self.prepared["train"]
        self["train"] = train.take(~held_out)

    def say_what_is_shared(self) -> None:
        """Print a notice if training and validation read the same data."""
        if shared := shared_content(self.sources["train"], self.sources["val"]):
            rank_zero_info(
                f"training and validation read the same data ({', '.join(shared[:3])}{', ...' * (len(shared) > 3)}), "
                "so val/loss measures rows that are trained on; give other data, or data.val_fraction"
            )

    def names(self, split: str) -> tuple[str, ...]:
        """Names of the split's loss curves; empty for a single data set without a name."""
        sources = self.sources[split]
        if split == "val" and self._val_fraction:
            sources = self.sources["train"]
        elif split == "test" and not sources:
            sources, split = self.sources["val"], "val"
        return tuple(source.title for source in sources) if split in self._named else ()

    def validation_rows(self) -> list[tuple[Source, frozenset[int] | None]]:
        """Sources of the validation data, each with the numbers of its rows; None stands for all.

        With ``val_fraction``, the rows are known once the split ``val`` was read.
        """
        if not self._val_fraction:
            return [(source, None) for source in self.sources["val"]]
        held_out = self["val"]
        sources = enumerate(self.sources["train"])
        return [(one, frozenset(held_out.rows[held_out.source == number].tolist())) for number, one in sources]

    def read_questions(self) -> list[Question]:
        """Rows that ``predict`` answers: those of the test data, else of the validation data.

        Raises:
            RecipeError: there are none.
        """
        sources = [(source, None) for source in self.sources["test"]] or self.validation_rows()
        if not sources:
            raise RecipeError("there are no rows to answer; name them with --data.test_path FILE")
        questions: list[Question] = []
        for source, rows in sources:
            questions += questions_of(self.preparation, source, rows)
        paths = ", ".join(source.path for source, _ in sources)
        if not questions:
            raise RecipeError(
                f"{paths}: there is no question to answer; set data.test_path to rows that ask one, e.g. a "
                '.jsonl file of {"instruction": "What is red?"}'
            )
        beside = "" if self.sources["test"] else " (the validation data; data.test_path names others)"
        rank_zero_info(f"{as_count(len(questions), 'question')} of {paths}{beside}")
        return [{**question, "row": number} for number, question in enumerate(questions)]

    def prompts(self, split: str) -> list[dict[str, str]]:
        """Prompt, question and expected answer, the last supervised one, of each row that has them; read once.

        Rows whose answer is judged a bad one are left out.
        """
        if split not in self._prompts:
            self._prompts[split] = self._read_prompts(split)
        return self._prompts[split]

    def _read_prompts(self, split: str) -> list[dict[str, str]]:
        samples, prompts = self[split], []
        for number, prepared in enumerate(self.prepared[split]):
            if prepared.source.index_prefix is not None:
                continue
            rows = set(samples.rows[samples.source == number].tolist())
            tokenization = self.preparation.tokenization(prepared.source)
            for row_number, (_, row) in enumerate(prepared.source.rows()):
                if row_number not in rows or isinstance(row, BadRow) or not tokenization.has_answer(row):
                    continue
                example = good_answer_of(tokenization.example(row))
                if isinstance(example, Text) and example.prompt:
                    parts = asked_by(example, tokenization)
                    prompts.append(dict(zip(("prompt", "question", "expected"), parts, strict=True)))
                if not isinstance(example, Chat):
                    continue
                if (chat := through_last_supervised_answer(example, tokenization.supervise)) is None:
                    continue
                template = tokenization.template_of(chat)
                prompt, question = prompt_of(chat, template)
                expected = expected_answer(chat, template)
                prompts.append({"prompt": prompt, "question": question["content"], "expected": expected})
        return prompts

    def texts(self, ids: Sequence[str]) -> dict[str, str]:
        """Decoded text of training samples, by their ids; unknown ids are left out."""
        samples = self["train"]
        return {name: self.tokenizer.decode(samples[i][0]) for name, i in samples.find(ids).items()}


_VERBS = {"train": "train", "val": "validate", "test": "test"}
