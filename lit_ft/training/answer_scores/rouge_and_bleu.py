"""ROUGE and BLEU of answers, in any script."""

from collections.abc import Sequence
from typing import Literal

import regex
from lit_callbacks.report.scored_answers import ScoredAnswer
from torchmetrics.functional.text import rouge_score, sacre_bleu_score

from lit_ft.training.answer_scores.exact_match import ExactMatch

_ROUGE = ("rouge1", "rouge2", "rougeL")
NAMES = (*_ROUGE, "bleu")
"""Names of the scores."""
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
"""Scripts that put no spaces between words."""
_WORD = regex.compile(rf"[{_UNSPACED}]\p{{M}}*|[\p{{L}}\p{{M}}\p{{N}}--[{_UNSPACED}]]+", regex.V1)
_WORD_OR_SIGN = regex.compile(rf"{_WORD.pattern}|\S", regex.V1)


class AnswerScores(ExactMatch):
    """Exact match, ROUGE and BLEU of greedy answers to held-out prompts, before and after training.

    Logged as ``val/exact_match``, ``val/rouge1``, ``val/rouge2``, ``val/rougeL`` and ``val/bleu``, all from 0 to 1;
    ``test`` logs them as ``test/...``. The answers are in ``validation_answers.jsonl`` of the run folder.
    """

    names = (*ExactMatch.names, *NAMES)

    def further_scores(self, answers: Sequence[ScoredAnswer]) -> dict[str, float]:
        """ROUGE and BLEU of answers, by ``NAMES``."""
        return rouge_and_bleu([one.answer for one in answers], [one.expected for one in answers])


def rouge_and_bleu(answers: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
    """Scores of answers, from 0 to 1, by ``NAMES``.

    ROUGE (Lin 2004, https://aclanthology.org/W04-1013) is the mean over the answers of the F-measure of what an answer
    and the expected one have in common: words, pairs of words, the longest common subsequence. On ASCII it is that of
    the package ``rouge_score`` without stemming. BLEU (Post 2018, arXiv:1804.08771) is that of all answers together,
    with 1 to 4 words, unsmoothed: 0 where no four words in a row are right.

    Args:
        answers: texts of the answers; at least one.
        expected: text that each of them is compared with.
    """
    # Functions, since the classes of these metrics would wait for the other ranks.
    rouge = rouge_score(answers, expected, normalizer=str.lower, tokenizer=words, rouge_keys=_ROUGE)
    bleu = sacre_bleu_score(answers, [[text] for text in expected], tokenize=bleu_tokenizer(expected))
    return {**{name: float(rouge[f"{name}_fmeasure"]) for name in _ROUGE}, "bleu": float(bleu)}


def words(text: str) -> list[str]:
    """Words that ROUGE compares: letters and digits in a row; where a script has no spaces, each of its characters."""
    return _WORD.findall(text)


def words_and_signs(text: str) -> list[str]:
    """Words as in ``words``, and each other character that is no white space."""
    return _WORD_OR_SIGN.findall(text)


def bleu_tokenizer(texts: Sequence[str]) -> Literal["13a", "zh"]:
    """SacreBLEU's tokenizer for texts: ``zh`` where one has Chinese characters, which are words, else ``13a``."""
    return "zh" if any(regex.search(r"\p{Han}", text) for text in texts) else "13a"
