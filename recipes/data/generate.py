"""Write the data sets of the recipes from templates and word lists of our own, in English and Chinese.

``python recipes/data/generate.py quickstart``          the instruction rows the quickstart trains on
``python recipes/data/generate.py pretrain --out DIR``  corpus, tokenizer and config of the tiny base model

The same seed gives the same bytes. The instruction rows ask about facts in their ``input``; the
corpus holds plain stories that state such facts and then restate them, so a model trained on it can
look a fact up but has never met the chat format or a row of instruction data.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 2048
CORPUS_DOCUMENTS = 60_000

# Qwen2.5's ChatML without its built-in system prompt. The generation marks let
# apply_chat_template(return_assistant_tokens_mask=True) find the supervised tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Each Chinese character is a piece of its own (else merges would glue a name to the verb after it),
# as is each digit; a word keeps the space before it.
PIECES = r"\p{Han}|\p{N}| ?[^\s\p{L}\p{N}\p{Han}]+| ?[^\P{L}\p{Han}]+|\s+"


@dataclass(frozen=True)
class Language:
    """Words and sentence templates of one language; a fact fills {name}, {colour} and {thing}."""

    names: tuple[str, ...]
    colours: tuple[str, ...]
    things: tuple[str, ...]
    places: tuple[str, ...]
    qualities: tuple[str, ...]
    numbers: tuple[str, ...]
    openings: tuple[str, ...]
    facts: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    restatements: tuple[str, ...]
    where: tuple[str, ...]
    where_again: tuple[str, ...]
    scene: tuple[str, ...]
    scene_again: tuple[str, ...]
    lists: tuple[str, ...]
    note: str
    counting: tuple[str, ...]
    sums: tuple[str, ...]
    space: str
    comma: str


ENGLISH = Language(
    names=tuple("Anna Ben Carl Dora Emma Frank Grace Henry Irene Jack Kate Leo Mary Nick Olga Paul ".split()),
    colours=tuple("red blue green yellow black white purple orange".split()),
    things=tuple("book cup key hat ball lamp bag pen plate coat chair box clock shoe drum boat".split()),
    places=tuple("garden kitchen school market park station library office yard hall".split()),
    qualities=tuple("big small quiet warm cold old new bright dark clean busy empty".split()),
    numbers=tuple("zero one two three four five six seven eight nine ten".split()),
    openings=(
        "It is a {quality} day in the {place}.",
        "Some friends meet in the {place}.",
        "This is a story about the {place}.",
        "The people in the {place} have many things.",
    ),
    facts=(
        "{name} has the {colour} {thing}.",
        "{name} owns the {colour} {thing}.",
        "{name} holds the {colour} {thing}.",
        "{name} brings the {colour} {thing}.",
    ),
    questions=(
        ("Who has the {colour} {thing}?", "{name}"),
        ("Which person has the {colour} {thing}?", "{name}"),
        ("Whose is the {colour} {thing}?", "{name}"),
        ("What does {name} have?", "the {colour} {thing}"),
        ("Which thing is with {name}?", "the {colour} {thing}"),
        ("What colour is {name}'s {thing}?", "{colour}"),
        ("Which colour does the {thing} of {name} have?", "{colour}"),
        ("Say in a sentence what {name} has.", "{name} has the {colour} {thing}."),
    ),
    restatements=(
        "The {colour} {thing} belongs to {name}.",
        "So the person with the {colour} {thing} is {name}.",
        "The one who has the {colour} {thing} is {name}.",
        "We know whose the {colour} {thing} is: {name}.",
        "With {name} is the {colour} {thing}.",
        "What {name} has is the {colour} {thing}.",
        "We see which thing is with {name}: the {colour} {thing}.",
        "{name}'s {thing} is {colour}.",
        "The {thing} of {name} is {colour}.",
        "We know what colour {name}'s {thing} does have: {colour}.",
        "We say it in a sentence: {name} has the {colour} {thing}.",
    ),
    where=("The {thing} is in the {place}.", "There is a {thing} in the {place}."),
    where_again=("In the {place} is the {thing}.", "So the {thing} can be found in the {place}."),
    scene=("The {place} is {quality}.", "Today the {place} looks {quality}."),
    scene_again=("It is {quality} in the {place}.", "A {quality} place is the {place}."),
    lists=("A list: {items}. The same list again: {again}.", "{items}. Once more: {again}."),
    note="{name} {colour} {thing}",
    counting=("Counting: {items}.", "The numbers go on: {items}."),
    sums=("{a} and {b} make {c}.", "{a} plus {b} is {c}."),
    space=" ",
    comma=", ",
)

CHINESE = Language(
    names=tuple("安娜 李雷 王芳 大卫 玛丽 杰克 丽莎 张伟 陈静 赵强 刘洋 孙悦 周明 吴敏 郑凯 冯琳".split()),
    colours=tuple("红色 蓝色 绿色 黄色 黑色 白色 紫色 橙色".split()),
    things=tuple("书 杯子 钥匙 帽子 皮球 台灯 背包 钢笔 盘子 大衣 椅子 箱子 时钟 鞋 鼓 小船".split()),
    places=tuple("花园 厨房 学校 市场 公园 车站 图书馆 办公室 院子 大厅".split()),
    qualities=tuple("宽敞 狭小 安静 温暖 寒冷 古老 崭新 明亮 昏暗 干净 热闹 空荡".split()),
    numbers=tuple("零 一 二 三 四 五 六 七 八 九 十".split()),
    openings=(
        "今天{place}里很{quality}。",
        "几个朋友在{place}见面。",
        "这是一个关于{place}的故事。",
        "{place}里的人有很多东西。",
    ),
    facts=(
        "{name}有{colour}的{thing}。",
        "{name}拥有{colour}的{thing}。",
        "{name}拿着{colour}的{thing}。",
        "{name}带来{colour}的{thing}。",
    ),
    questions=(
        ("谁有{colour}的{thing}？", "{name}"),
        ("哪个人有{colour}的{thing}？", "{name}"),
        ("{colour}的{thing}是谁的？", "{name}"),
        ("{name}有什么？", "{colour}的{thing}"),
        ("{name}的东西是哪一件？", "{colour}的{thing}"),
        ("{name}的{thing}是什么颜色？", "{colour}"),
        ("{name}那里的{thing}是哪种颜色？", "{colour}"),
        ("用一句话说说{name}有什么。", "{name}有{colour}的{thing}。"),
    ),
    restatements=(
        "{colour}的{thing}属于{name}。",
        "所以有{colour}的{thing}的人是{name}。",
        "大家知道谁有{colour}的{thing}，那个人是{name}。",
        "我们知道{colour}的{thing}是谁的：{name}。",
        "在{name}那里的是{colour}的{thing}。",
        "{name}有的是{colour}的{thing}。",
        "大家看到{name}的东西是哪一件：{colour}的{thing}。",
        "{name}的{thing}是{colour}。",
        "{name}那里的{thing}是{colour}。",
        "我们知道{name}的{thing}是什么颜色：{colour}。",
        "用一句话说：{name}有{colour}的{thing}。",
    ),
    where=("{thing}在{place}里。", "有一个{thing}在{place}。"),
    where_again=("{place}里的是{thing}。", "所以{thing}可以在{place}找到。"),
    scene=("{place}很{quality}。", "今天的{place}看起来{quality}。"),
    scene_again=("{quality}的地方是{place}。", "说到{place}，那里很{quality}。"),
    lists=("清单：{items}。同样的清单：{again}。", "{items}。再说一遍：{again}。"),
    note="{name}{colour}{thing}",
    counting=("数一数：{items}。", "数字往下走：{items}。"),
    sums=("{a}加{b}等于{c}。", "{a}和{b}一共是{c}。"),
    space="",
    comma="、",
)

Fields = dict[str, str]


def draw_facts(language: Language, count: int, rng: random.Random) -> list[Fields]:
    """``count`` facts; no name, colour or thing occurs twice, so each question has one answer."""
    columns = [rng.sample(words, count) for words in (language.names, language.colours, language.things)]
    return [dict(zip(("name", "colour", "thing"), row, strict=True)) for row in zip(*columns, strict=True)]


def instruction_row(language: Language, rng: random.Random) -> Fields:
    """One alpaca row: three facts as ``input``, a question about one of them, its answer."""
    facts = draw_facts(language, 3, rng)
    told = language.space.join(language.facts[0].format(**fact) for fact in facts)
    question, answer = rng.choice(language.questions)
    asked = rng.choice(facts)
    return {"instruction": question.format(**asked), "input": told, "output": answer.format(**asked)}


def unique_rows(language: Language, count: int, rng: random.Random) -> list[Fields]:
    """``count`` rows of which no two share both ``instruction`` and ``input``."""
    rows: dict[tuple[str, str], Fields] = {}
    while len(rows) < count:
        row = instruction_row(language, rng)
        rows[row["instruction"], row["input"]] = row
    return list(rows.values())


def write_quickstart(out: Path, seed: int, train_rows: int = 2400, val_rows: int = 200) -> None:
    """Write ``quickstart_train.json`` and ``quickstart_val.json``, half English and half Chinese."""
    rng = random.Random(seed)
    train: list[Fields] = []
    val: list[Fields] = []
    for language in (ENGLISH, CHINESE):
        rows = unique_rows(language, (train_rows + val_rows) // 2, rng)
        val += rows[: val_rows // 2]
        train += rows[val_rows // 2 :]
    rng.shuffle(train)
    out.mkdir(parents=True, exist_ok=True)
    for name, split in (("train", train), ("val", val)):
        text = json.dumps(split, ensure_ascii=False, indent=1) + "\n"
        (out / f"quickstart_{name}.json").write_text(text, encoding="utf-8")


def ownership_story(language: Language, rng: random.Random) -> str:
    """Who has what, told once and then restated in other words and another order."""
    facts = draw_facts(language, rng.choice((1, 1, 2, 2, 3, 3, 4)), rng)
    verb = rng.choice(language.facts)
    told = [verb.format(**fact) for fact in facts]
    again = [
        template.format(**fact)
        for template in rng.sample(language.restatements, 2)
        for fact in rng.sample(facts, len(facts))
    ]
    return language.space.join(told + again)


def scene_story(language: Language, rng: random.Random) -> str:
    """Where things are and what places are like, each restated in another order."""
    columns = [rng.sample(words, 3) for words in (language.places, language.things, language.qualities)]
    rows = [dict(zip(("place", "thing", "quality"), row, strict=True)) for row in zip(*columns, strict=True)]
    first, second = rng.choice(((language.where, language.where_again), (language.scene, language.scene_again)))
    told = [rng.choice(first).format(**row) for row in rows]
    again = [rng.choice(second).format(**row) for row in rng.sample(rows, len(rows))]
    return language.space.join(told + again)


def repeated_list(language: Language, rng: random.Random) -> str:
    """A list of any words said twice, which teaches copying."""
    words = language.names + language.colours + language.things + language.places
    items = language.comma.join(rng.sample(words, rng.randint(6, 12)))
    return rng.choice(language.lists).format(items=items, again=items)


def repeated_notes(language: Language, rng: random.Random) -> str:
    """Who has what in shorthand, said again in another order, which teaches look-up by a neighbour."""
    notes = [language.note.format(**fact) for fact in draw_facts(language, rng.randint(3, 6), rng)]
    again = rng.sample(notes, len(notes))
    return rng.choice(language.lists).format(items=language.comma.join(notes), again=language.comma.join(again))


def counting_text(language: Language, rng: random.Random) -> str:
    """Consecutive numbers, in words or in digits."""
    start = rng.randint(0, 5)
    numbers = range(start, start + rng.randint(3, 6))
    in_words = rng.random() < 0.5
    items = language.comma.join(language.numbers[n] if in_words else str(n) for n in numbers)
    return rng.choice(language.counting).format(items=items)


def sum_text(language: Language, rng: random.Random) -> str:
    """A sum up to ten in words and again in digits."""
    a = rng.randint(0, 10)
    b = rng.randint(0, 10 - a)
    template = rng.choice(language.sums)
    in_words = [language.numbers[n] for n in (a, b, a + b)]
    spelled = template.format(a=in_words[0], b=in_words[1], c=in_words[2])
    return language.space.join([spelled, f"{a} + {b} = {a + b}{spelled[-1]}"])


# Look-up of facts is what the fine-tuning recipes build on, so most documents are about it.
DOCUMENT_KINDS: tuple[tuple[Callable[[Language, random.Random], str], float], ...] = (
    (ownership_story, 0.55),
    (repeated_notes, 0.15),
    (repeated_list, 0.14),
    (scene_story, 0.10),
    (counting_text, 0.03),
    (sum_text, 0.03),
)


def corpus_documents(count: int, seed: int) -> Iterator[str]:
    """``count`` plain-text documents, English and Chinese in turn."""
    rng = random.Random(seed)
    kinds, weights = zip(*DOCUMENT_KINDS, strict=True)
    for index in range(count):
        kind = rng.choices(kinds, weights)[0]
        yield kind((ENGLISH, CHINESE)[index % 2], rng)


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
        initializer_range=0.06,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        **token_ids,
    ).save_pretrained(out)
    GenerationConfig(do_sample=False, **token_ids).save_pretrained(out)


def write_pretrain(out: Path, seed: int, documents: int) -> None:
    """Write ``corpus.jsonl``, the tokenizer, ``config.json`` and ``generation_config.json``."""
    out.mkdir(parents=True, exist_ok=True)
    texts = list(corpus_documents(documents, seed))
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    (out / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
    write_tokenizer(texts, out)
    write_config(out)


def main() -> None:
    """Parse the command line and write what it asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    quickstart = commands.add_parser("quickstart", help="instruction rows, alpaca style")
    quickstart.add_argument("--out", type=Path, default=HERE)
    quickstart.add_argument("--seed", type=int, default=0)
    pretrain = commands.add_parser("pretrain", help="plain-text corpus, tokenizer and config")
    pretrain.add_argument("--out", type=Path, required=True)
    pretrain.add_argument("--seed", type=int, default=0)
    pretrain.add_argument("--documents", type=int, default=CORPUS_DOCUMENTS)
    args = parser.parse_args()
    if args.command == "quickstart":
        write_quickstart(args.out, args.seed)
    else:
        write_pretrain(args.out, args.seed, args.documents)


if __name__ == "__main__":
    main()
