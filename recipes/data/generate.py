"""Write the data sets of the recipes from templates and word lists of our own, in English and Chinese.

``python recipes/data/generate.py quickstart``          the rows that the quickstart trains on
``python recipes/data/generate.py preferences``         right and wrong answers, in pairs and judged one by one, for
                                                        preference tuning
``python recipes/data/generate.py pretrain --out DIR``  corpus, tokenizer and config of the tiny base model

The same seed gives the same bytes. The corpus describes a small world in both languages, sentence by
sentence, and says which word of one language is which of the other. The instruction rows ask for whole
sentences to be translated, in a chat: the base model knows the words, but has met neither a
translated sentence nor a chat.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 2048
CORPUS_DOCUMENTS = 60_000
ENGLISH, CHINESE = 0, 1
Language = int

# Qwen2.5's ChatML without its built-in system prompt.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Each Chinese character is a piece of its own (else merges would glue a name to the verb after it),
# as is each digit; a word keeps the space before it.
PIECES = r"\p{Han}|\p{N}| ?[^\s\p{L}\p{N}\p{Han}]+| ?[^\P{L}\p{Han}]+|\s+"


def _pairs(text: str) -> list[tuple[str, str]]:
    words = text.split()
    return list(zip(words[::2], words[1::2], strict=True))


WORDS: dict[str, list[tuple[str, str]]] = {
    "name": _pairs(
        "Anna 安娜 David 大卫 Mary 玛丽 Jack 杰克 Lisa 丽莎 Tom 汤姆 Lucy 露西 Peter 彼得 Bob 鲍勃 Helen 海伦 "
        "Mike 迈克 Emma 艾玛"
    ),
    "colour": _pairs("red 红色 blue 蓝色 green 绿色 yellow 黄色 black 黑色 white 白色 purple 紫色 pink 粉色"),
    "thing": _pairs(
        "book 书 cup 杯子 key 钥匙 hat 帽子 ball 皮球 lamp 台灯 pen 钢笔 coat 大衣 chair 椅子 clock 时钟 drum 鼓 "
        "umbrella 雨伞"
    ),
    "place": _pairs(
        "garden 花园 kitchen 厨房 school 学校 market 市场 park 公园 station 车站 library 图书馆 office 办公室"
    ),
    "job": _pairs("teacher 老师 doctor 医生 farmer 农民 driver 司机 painter 画家 singer 歌手"),
    "material": _pairs("wood 木头 paper 纸 glass 玻璃 metal 金属 cloth 布 leather 皮革"),
}
"""Words of each kind, English and Chinese."""

SENTENCES: list[tuple[str, str]] = [
    ("{name} has the {colour} {thing}.", "{name}有{colour}的{thing}。"),
    ("{name} brings the {colour} {thing} to the {place}.", "{name}把{colour}的{thing}带到{place}。"),
    ("The {colour} {thing} belongs to {name}.", "{colour}的{thing}属于{name}。"),
    ("The {thing} in the {place} is {colour}.", "{place}里的{thing}是{colour}。"),
    ("{name} waits in the {place}.", "{name}在{place}等着。"),
]
"""What happens in the world, in both languages; the quickstart asks to translate such sentences."""

ABOUT_NAME = [
    ("{name} is a {job}.", "{name}是{job}。"),
    ("{name} likes the colour {colour}.", "{name}喜欢{colour}。"),
    ("{name} lives near the {place}.", "{name}住在{place}旁边。"),
    ("{name} looks for a {thing}.", "{name}在找{thing}。"),
]
ABOUT_THING = [
    ("A {thing} is made of {material}.", "{thing}是用{material}做的。"),
    ("The {thing} is kept in the {place}.", "{thing}放在{place}里。"),
    ("Most often a {thing} is {colour}.", "{thing}多半是{colour}。"),
]
"""What never changes in the world: each name and thing has its own, so that each word has a use of its own."""

DICTIONARY = ("{english} is {chinese} in Chinese.", "{chinese}用英文说是{english}。")

REQUESTS = (("Translate into English.", "Say it in English."), ("翻译成中文。", "用中文说。"))
"""Instructions by the language of the answer; they are written in that language."""

JOIN = (" ", "")
Fields = dict[str, int]
"""For each kind of word, which one."""


def fill(template: str, fields: Fields, language: Language) -> str:
    """Put a language's words into a template."""
    return template.format(**{kind: WORDS[kind][index][language] for kind, index in fields.items()})


def draw(rng: random.Random) -> Fields:
    """A word of each kind."""
    return {kind: rng.randrange(len(words)) for kind, words in WORDS.items()}


def world_text(language: Language, rng: random.Random) -> str:
    """What is always true of a few names or things."""
    kind, templates = rng.choice((("name", ABOUT_NAME), ("thing", ABOUT_THING)))
    sentences = []
    for index in rng.sample(range(len(WORDS[kind])), 2):
        fields = {**draw(random.Random(f"{kind} {index}")), kind: index}
        sentences += [fill(template[language], fields, language) for template in templates]
    rng.shuffle(sentences)
    return JOIN[language].join(sentences)


def event_text(language: Language, rng: random.Random) -> str:
    """Things that happen, at random."""
    return JOIN[language].join(fill(rng.choice(SENTENCES)[language], draw(rng), language) for _ in range(3))


def dictionary_text(language: Language, rng: random.Random) -> str:
    """Words of one language and what they are in the other."""
    entries = []
    for _ in range(6):
        english, chinese = rng.choice(WORDS[rng.choice(list(WORDS))])
        entries.append(DICTIONARY[language].format(english=english, chinese=chinese))
    return JOIN[language].join(entries)


def bilingual_text(language: Language, rng: random.Random) -> str:
    """Things that happen, each told in one language and then in the other."""
    told = []
    for _ in range(3):
        sentence, fields = rng.choice(SENTENCES), draw(rng)
        told += [fill(sentence[which], fields, which) for which in (language, 1 - language)]
    return " ".join(told)


def list_text(language: Language, rng: random.Random) -> str:
    """Words of one kind in a row, said twice."""
    words = [pair[language] for pair in WORDS[rng.choice(list(WORDS))]]
    items = (", ", "、")[language].join(rng.sample(words, rng.randint(3, 6)))
    return ("{0}. Once more: {0}.", "{0}。再说一遍：{0}。")[language].format(items)


DOCUMENT_KINDS: tuple[tuple[Callable[[Language, random.Random], str], float], ...] = (
    (bilingual_text, 0.5),
    (dictionary_text, 0.2),
    (world_text, 0.2),
    (event_text, 0.05),
    (list_text, 0.05),
)


def corpus_documents(count: int, seed: int) -> Iterator[str]:
    """``count`` plain-text documents, English and Chinese in turn."""
    rng = random.Random(seed)
    kinds, weights = zip(*DOCUMENT_KINDS, strict=True)
    for index in range(count):
        yield rng.choices(kinds, weights)[0]((ENGLISH, CHINESE)[index % 2], rng)


def instruction_row(answer_in: Language, rng: random.Random) -> dict[str, str]:
    """One alpaca row: a sentence in one language as ``input``, its translation as ``output``."""
    sentence, fields = rng.choice(SENTENCES), draw(rng)
    return {
        "instruction": rng.choice(REQUESTS[answer_in]),
        "input": fill(sentence[1 - answer_in], fields, 1 - answer_in),
        "output": fill(sentence[answer_in], fields, answer_in),
    }


def write_quickstart(out: Path, seed: int, train_rows: int = 2400, val_rows: int = 200) -> None:
    """Write ``quickstart_train.json`` and ``quickstart_val.json``, half into English and half into Chinese.

    No sentence occurs twice, so every held-out one is new.
    """
    rng = random.Random(seed)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < train_rows + val_rows:
        row = instruction_row((ENGLISH, CHINESE)[len(rows) % 2], rng)
        if row["input"] not in rows and row["output"] not in rows:
            rows[row["input"]] = row
    values = list(rows.values())
    out.mkdir(parents=True, exist_ok=True)
    for name, split in (("val", values[:val_rows]), ("train", values[val_rows:])):
        text = json.dumps(split, ensure_ascii=False, indent=1) + "\n"
        (out / f"quickstart_{name}.json").write_text(text, encoding="utf-8")
    # Raw text of the base model's kind, for recipes that mix sources; the corpus itself has another seed.
    lines = [text.replace("\n", " ") for text in corpus_documents(400, seed + 1)]
    (out / "mixture_text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def preference_row(answer_in: Language, rng: random.Random) -> dict[str, object]:
    """One pair: a sentence to translate, its translation, and one with another word of one kind."""
    (sentence, fields), request = (rng.choice(SENTENCES), draw(rng)), rng.choice(REQUESTS[answer_in])
    kind = rng.choice([kind for kind in WORDS if f"{{{kind}}}" in sentence[0]])
    wrong = {**fields, kind: (fields[kind] + rng.randrange(1, len(WORDS[kind]))) % len(WORDS[kind])}
    question = f"{request}\n{fill(sentence[1 - answer_in], fields, 1 - answer_in)}"
    chosen, rejected = (fill(sentence[answer_in], words, answer_in) for words in (fields, wrong))
    return {
        "prompt": [{"role": "user", "content": question}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


def write_preferences(out: Path, seed: int, count: int = 60) -> None:
    """Write ``preferences.jsonl``, half into English and half into Chinese, and its answers in another file."""
    rng = random.Random(seed)
    rows = [preference_row((ENGLISH, CHINESE)[index % 2], rng) for index in range(count)]
    judged: list[dict[str, object]] = [
        {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
        for row in rows
        for name in ("chosen", "rejected")
    ]
    rng.shuffle(judged)
    out.mkdir(parents=True, exist_ok=True)
    for name, written in (("preferences", rows), ("judged_answers", judged)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in written)
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")


def write_tokenizer(documents: list[str], out: Path) -> None:
    """Train a byte-level BPE on ``documents`` and save it with ChatML tokens and template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    ).save_pretrained(out)


def write_config(out: Path) -> None:
    """Save the Qwen2 config of the tiny base model for the tokenizer in ``out``."""
    from transformers import AutoTokenizer, GenerationConfig, Qwen2Config

    tokenizer = AutoTokenizer.from_pretrained(out)
    token_ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        # A multiple of 64 divides among tensor-parallel ranks.
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        # About 1 / sqrt(hidden_size): with Qwen2's 0.02, words of one kind stay alike for long.
        initializer_range=0.07,
        bos_token_id=None,
        **token_ids,
    ).save_pretrained(out)
    GenerationConfig(do_sample=False, **token_ids).save_pretrained(out)


def write_pretrain(out: Path, seed: int, documents: int) -> None:
    """Write ``corpus.jsonl``, the tokenizer, ``config.json`` and ``generation_config.json``."""
    out.mkdir(parents=True, exist_ok=True)
    texts = list(corpus_documents(documents, seed))
    with (out / "corpus.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    write_tokenizer(texts, out)
    write_config(out)


def main() -> None:
    """Parse the command line and write what it asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    commands = parser.add_subparsers(dest="command", required=True)
    quickstart = commands.add_parser("quickstart", help="the instruction rows, train and held-out")
    quickstart.add_argument("--out", type=Path, default=HERE)
    preferences = commands.add_parser("preferences", help="right and wrong answers")
    preferences.add_argument("--out", type=Path, default=HERE)
    pretrain = commands.add_parser("pretrain", help="corpus, tokenizer and config of the base model")
    pretrain.add_argument("--out", type=Path, required=True)
    pretrain.add_argument("--documents", type=int, default=CORPUS_DOCUMENTS)
    options = parser.parse_args()
    if options.command == "quickstart":
        write_quickstart(options.out, options.seed)
    elif options.command == "preferences":
        write_preferences(options.out, options.seed)
    else:
        write_pretrain(options.out, options.seed, options.documents)


if __name__ == "__main__":
    main()
