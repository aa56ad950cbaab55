"""Mistakes of the command line that the parser finds: one line each that says what to write, and exit code 2."""

import shlex
from pathlib import Path

import pytest
from command_line import run

pytestmark = pytest.mark.slow

TYPED: dict[str, str] = {
    "fit": "model.pretrained: is missing; name a recipe with --config FILE, or a model's folder or hub id",
    "predict": "model.pretrained: is missing; name a recipe with --config FILE",
    "plan": "model.pretrained: is missing; name a recipe with --config FILE",
    "fit --config": "--config has no value behind it; add one, e.g. --config recipes/qwen.yaml",
    "fit --config quickstat.yaml": "quickstat.yaml: there is no such file; did you mean {here}/quickstart.yaml?",
    "fit --config other/none.yaml": "none.yaml: there is no such file; name a recipe, e.g. recipes/qwen.yaml",
    "fit quickstart.yaml": "'quickstart.yaml' stands alone; write --config quickstart.yaml",
    "fit --config quickstart.yaml again": "'again' belongs to no option; write --OPTION again",
    "fit --lr_scheduler.warmup 5": "and none is named before it; write --lr_scheduler lit_ft.sch",
    "fit --data.sources '[a.json, b.json]'": "'a.json' is no source; each is a mapping, e.g. [{path: a.json}]",
    "fit --data.columns '{instruction:question}'": "data.columns: '{instruction:question}' is one text; put a space",
    "fit --optimizer torch.optim.AdamW --optimizer.lr fast": "optimizer.lr: 'fast' is no number",
    "fit --optimizer AdamW8bits": "'AdamW8bits' is no class path; write the module and the class, e.g. t",
    "fit --optimizer AdamWw": "'AdamWw' is no class path; write torch.optim.AdamW",
    "fit --lr_scheduler CosineWarmup": "'CosineWarmup' is no class path; write lit_ft.schedules.CosineWithWarmup",
    "fit --model.pretrained no --data.path no --trainer.callbacks ModelCheckpoint --trainer.callbacks.save_top_k 2": (
        "No quantity for top_k to track. To keep the newest ones, set monitor: step and mode: max"
    ),
    "fit --trainer.logger wandb": "write lightning.pytorch.loggers.WandbLogger; see recipes/loggers/wandb.yaml",
    "fit --trainer.callbacks EarlyStop": "write lightning.pytorch.callbacks.EarlyStopping",
    "fit --trainer.callbacks nothing_like_it": "class, e.g. lightning.pytorch.callbacks.EarlyStopping",
    "fit --model.peft Lora": "model.peft: 'Lora' is no class path; write peft.LoraConfig",
    "fit --model.peft peft.LoraConfig --model.peft.init_lora_weights pisa": "lora_ga, true, false; did you mean pissa?",
    "fit --model.quantization nf4": "write transformers.BitsAndBytesConfig; see recipes/tuning/qlora_nf4.yaml",
    "fit --model.objective.beta 2": "unknown option 'objective.beta'; it is an option of lit_ft.PreferenceLM, a",
    "fit --model.token_weights dft": "model.token_weights: 'dft' is no class path; write lit_ft.DFT",
    "fit --model.token_weights true": "no class path; write the module and the class, e.g. lit_ft.DFT",
    "fit --model.token_weights lit_ft.DPO": "lit_ft.DPO is no TokenWeights; name a class that derives from it, e.g.",
    "fit --model.token_weights '{power: 1}'": "no class is named, and TokenWeights is abstract; write class_path, e.g.",
    "fit --model.token_weights lit_ft.training.loss.token_weights.TokenWeights": "TokenWeights lacks methods that its",
    "fit --model lit_ft.PreferenceLM --model.objective lit_ft.DFT": "lit_ft.DFT is no Objective; take lit_ft.DPO, lit_",
    "fit --model lit_ft.PolicyLM --model.rewards '[{class_path: lit_ft.GRPO}]'": "lit_ft.GRPO is no Reward; take "
    "lit_ft.ExactAnswer, lit_ft.FinalNumber, lit_ft.Matches, lit_ft.OverlongPenalty, lit_ft.RewardModel or "
    "lit_ft.Similarity, or another",
    "fit --model lit_ft.PolicyLM --model.rewards '[lit_ft.GRPO]'": "rewards: lit_ft.GRPO is no Reward; take lit_ft",
    "fit --model lit_ft.PolicyLM --model.algorithm '{class_path: torch.nn.Linear}'": "torch.nn.Linear is no Algorithm; "
    "take lit_ft.DAPO, lit_ft.DrGRPO, lit_ft.GRPO or lit_ft.RLOO, or another class that derives from it",
    "fit --model lit_ft.GRPO": "model: lit_ft.GRPO is no LightningModule; take lit_ft.CausalLM, lit_ft.DistillationLM",
    "fit --data.class_path lit_ft.GRPO": "data: lit_ft.GRPO is no LightningDataModule; name a class that derives fro",
    "fit --trainer.logger '[{class_path: torch.nn.Linear}]'": "torch.nn.Linear is no Logger; name a class that derives",
    "fit --trainer.plugins '[{class_path: torch.nn.Linear}]'": "torch.nn.Linear is no Precision or ClusterEnvironment",
    "fit --optimizer '{class_path: torch.nn.Linear}'": "optimizer: torch.nn.Linear is no Optimizer; name a class that",
    "fit --model.peft '{class_path: torch.nn.Linear}'": "torch.nn.Linear is no PeftConfig; name a class that derives",
    "fit --model.peft torch.nn.Linear": "torch.nn.Linear is no PeftConfig; name a class that derives from it, e.g. pef",
    "fit --optimizer lit_ft.DFT": "optimizer: lit_ft.DFT is no Optimizer; name a class that derives from it, e.g. tor",
    "fit --lr_scheduler torch.optim.AdamW": "torch.optim.AdamW is no LRScheduler or ReduceLROnPlateau; take",
    "fit --pretrained_model_name_or_path x": "here it is model.pretrained",
    "fit --eval_steps 5": "trainer.val_check_interval in micro-batches: times trainer.accumulate_grad_batches",
    "convert model": "PATH, --from, --to and --out are missing; see python -m lit_ft convert model --help",
    "convert model --from hf --to megatron x": "--out is missing; see python -m lit_ft convert model --help",
    "chat": "PATH is missing; see python -m lit_ft chat --help",
    "sweep": "the following arguments are required: --vary; see python -m lit_ft sweep --help",
    "check --samples many": "argument --samples: invalid int value: 'many'; see python -m lit_ft check --help",
    "report": "the following arguments are required: RUN; see python -m lit_ft report --help",
    "fit -config quickstart.yaml": "'-config' begins with one dash; write --config",
    "fit \u2013-data.max_length 5": "begins with another dash; write --data.max_length",
    "fit \u2014data.max_length 5": "begins with another dash; write --data.max_length",
    "fit --config .": "{here}/.: is no file; name a recipe in it, e.g. recipes/qwen.yaml",
    "fit --merge maybe": "merge='maybe' is neither true nor false",
    "fit --optimizer torch.optim.AdamW --optimizer.lr 2e-4,3e-4": "optimizer.lr: '2e-4,3e-4' is no number",
    "fit --trainer.strategy.tensor_parallel_size 2": "trainer.strategy: tensor_parallel_size is an option of a class, "
    "and none is named before it; write --trainer.strategy lit_ft.strategies.ModelParallelStrategy",
    "fit --trainer.strategy.config ds_z2.json": "write --trainer.strategy lit_ft.strategies.DeepSpeedStrategy, in",
    "fit --data.supervise last_round": "'last_round' is none of assistant, last, all; did you mean last?",
    "fit --data.mixing interleave_under": "did you mean first_exhausted?",
    "fit --data.overlong delete": "did you mean drop?",
    "fit --trainer.strategy ddp --trainer.strategy.init_args.shard_size 2": "shard_size is an option of a class, and "
    "none is named before it; write --trainer.strategy lit_ft.strategies.FSDPStrategy",
    "fit --trainer.strategy.class_path auto": "'auto' is no class path; write the module and the class",
    "fit --trainer.strategy.class_path lit_ft.FSDPStrategy": "no lit_ft.FSDPStrategy; write lit_ft.strategies.FSDPS",
    "fit --config quickstart.yaml --max_length 5": "unknown option 'max_length'; it belongs to data: data.max_length",
    "fit --config quickstart.yaml --peft.r 8": "unknown option 'peft.r'; it belongs to model: model.peft.r",
    "fit --model.peft.r 8": "LoraConfig, in a recipe peft: {class_path: peft.LoraConfig, init_args: {r: ",
    "fit --model.quantization.load_in_4bit true": "model.quantization: load_in_4bit is an option of a class, and none",
    "fit --model.peft peft.LoraConfig --model.peft.rank 8": "model.peft: unknown option 'rank'; here it is model.peft",
    "fit --model.revision main": "; leave it out: download it (hf download --revision), and name its folder",
    "fit --model Qwen/Qwen2.5": "model: Qwen/Qwen2.5 is no mapping; give options by name: model: {pretrained: Qwen/Q",
    "fit --data rows.json": "data: rows.json is no mapping; give options by name: data: {path: rows.json}",
    "fit --trainer max_epochs=3": "trainer: 'max_epochs=3' is no mapping; give options by name, e.g. trainer: {max_e",
    "fit --data '[a.json]'": "data: ['a.json'] is a list; of several files write data: {sources: [{path: ...}, {path",
    "fit --data.path a.json b.json": "; of several files write --data.sources '[{path: b.json}, ...]'",
    "fit rows.json": "'rows.json' belongs to no option; name data with --data.path rows.json; of several files",
    "fit --data.max_rows 5": "data: unknown option 'max_rows'; it is an option of each source: data.sources: [{pa",
    "fit --model.r 8": "model: unknown option 'r'; it belongs to model.peft: model.peft.r",
    "fit --beta 0.1": "unknown option 'beta'; it is an option of lit_ft.DPO, a class for model.objective",
    "fit --simpo_gamma 1": "here it is gamma of the class lit_ft.SimPO (model.objective)",
    "fit --ref_model x": "; leave it out: the reference is the model as the run begins (docs/preferences.md)",
    "fit --scale_rewards none": "here it is model.algorithm.scale_rewards of lit_ft.GRPO",
    "fit --model.reward_weights '[1]'": "here it is model.reward_weights of lit_ft.PolicyLM",
    "fit --use_vllm true": "; leave it out: answers come from the weights that train",
    "fit --model lit_ft.PolicyLM --model.algorithm grpo": "'grpo' is no class path; write lit_ft.GRPO",
    "fit --model lit_ft.PolicyLM --model.rewards '[soft_overlong]'": "is no class path; write lit_ft.OverlongPenalty",
    "fit --model lit_ft.PolicyLM --model.rewards '[{pattern: x}]'": "no class is named, and Reward is abstract; write",
    "fit --lmbda 1": "here it is model.on_policy of lit_ft.OnPolicyDistillationLM (0: lit_ft.DistillationLM)",
    "fit --sft_alpha 1": "here it is model.kd_ratio of lit_ft.DistillationLM (1 / (1 + sft_alpha))",
    "fit --kd_ratio 0.5": "unknown option 'kd_ratio'; it is an option of lit_ft.DistillationLM, a class for model",
    "fit --model lit_ft.DistillationLM --model.on_policy 1": "it is an option of lit_ft.OnPolicyDistillationLM",
    "fit --model lit_ft.DistillationLM --model.temperature 2": "(of a divergence: model.divergence.temperature)",
    "fit --model lit_ft.DistillationLM --model.divergence jsd": "'jsd' is no class path; write lit_ft.JensenShannon",
    "fit --model lit_ft.DistillationLM --model.divergence lit_ft.DPO": "lit_ft.DPO is no Divergence; take lit_ft.For",
    "fit --model lit_ft.DistillationLM --model.divergence.beta 1": "none is named before it; write --model.divergence "
    "lit_ft.JensenShannon, in a recipe divergence: {class_path: lit_ft.JensenShannon, init_args: {beta: ...}}",
    "fit --model lit_ft.DistillationLM --model.divergence '{temperature: 2}'": "write --model.divergence lit_ft.Forw",
    "fit --rlhf_type dpo": "; leave it out: supervised training, or a recipe of preference, policy or distillation",
    "fit --model.objective lit_ft.DPO": "it is an option of lit_ft.PreferenceLM, a class for model",
    "fit --model lit_ft.PreferenceLM --model.objective dpo": "'dpo' is no class path; write lit_ft.DPO",
    "fit --model lit_ft.PreferenceLM --model.objective.beta 1": "none is named before it; write --model.objective "
    "lit_ft.DPO, in a recipe objective: {class_path: lit_ft.DPO, init_args: {beta: ...}}",
    "fit --model lit_ft.PreferenceLM --model.objective '{tau: 1}'": "write --model.objective lit_ft.IPO, in a recipe",
    "fit --trainer.save_top_k 2": "it is an option of lightning.pytorch.callbacks.ModelCheckpoint, a class for train",
    "fit --tensor_parallel_size 2": "it is an option of lit_ft.strategies.ModelParallelStrategy, a class for train",
    "fit --lr_scheduler.help": "no value behind it; add one, e.g. --lr_scheduler.help lit_ft.schedules.CosineW",
    "fit --data.type alpaca": "data: unknown option 'type'; see --help for what there is",
    "fit --train.epochs 3": "unknown option 'train.epochs'; here it is trainer.max_epochs",
    "fit --data.path '[a.json, b.json]'": "data.path: a list is given; of several files write data.sources: [{path: a",
    "fit --data.sources a.json": "data.sources: 'a.json' is no source; each is a mapping, e.g. [{path: a.json}]",
    "fit --model.peft false": "model.peft: 'false' is no class path; for none write null",
    "fit --optimizer '[torch.optim.AdamW]'": "optimizer: ['torch.optim.AdamW'] names no class; write e.g. torch.optim",
    "fit --optimizer transformers.AdamW": "optimizer: there is no transformers.AdamW; write torch.optim.AdamW",
    "fit --lr_scheduler transformers.get_cosine_schedule_with_warmup": "is a function, and a class is needed, e.g. lit",
    "fit --trainer.callbacks EarlyStopping": "trainer.callbacks.monitor: is missing; give it a value",
    "fit --trainer.logger swanlab": "write the class that recipes/loggers/swanlab.yaml names",
    "fit --trainer.logger '[{class_path: my.Logger, init_args: {x: 1}}]'": "'my.Logger' is code outside of the",
    "fit --trainer.logger '[{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {nam: x}}]'": "'nam'; did",
    "fit --trainer.logger csv": "trainer.logger: 'csv' is no class path; leave it out: every run writes metrics.csv",
    "fit help": "'help' has no dashes; write --help",
    "fit data.path=a.json": "'data.path=a.json' has no dashes; write --data.path=a.json",
    "fit --config quickstart.yaml,more.yaml": "there is no such file; give each file a --config of its own",
    "fit --trainer.max-epochs 3": "unknown option 'trainer.max-epochs'; did you mean 'trainer.max_epochs'?",
    "fit --trainer:max_epochs 3": "unknown option 'trainer:max_epochs'; did you mean 'trainer.max_epochs'?",
    "fit --model.peft none": "model.peft: 'none' is no class path; for none write null",
    "fit --conf quickstart.yaml": "unknown option 'conf'; did you mean 'config'?",
    "fit --trainer.max_step 3": "unknown option 'trainer.max_step'; did you mean 'trainer.max_steps'?",
    "fit --run here": "unknown option 'run'; did you mean 'run_dir'?",
    "validate --ckpt_pat last": "unknown option 'ckpt_pat'; did you mean 'ckpt_path'?",
    "test --trainer.limit_test 1": "unknown option 'trainer.limit_test'; did you mean 'trainer.limit_test_batches'?",
    "predict --max_new 3": "unknown option 'max_new'; did you mean 'max_new_tokens'?",
    "check --sample 3": "unknown option --sample; did you mean --samples?",
    "check --trainer.max_step=3": "unknown option 'trainer.max_step'; did you mean 'trainer.max_steps'?",
    "plan --memory_gib 24GB": "argument --memory_gib: '24GB' must be a number above 0, e.g. 24",
    "check --samples -1": "argument --samples: -1 must be 0 or more",
    "predict --run here": "unknown option 'run'; write --config RUN/config.yaml --ckpt_path last",
    "predict --max_new_tokens 0": "max_new_tokens: 0 must be 1 or more",
    "plan --memory 24": "unknown option --memory; did you mean --memory_gib?",
    "sweep --var optimizer.lr=1,2": "unknown option --var; did you mean --vary?",
    "report --ou page.html run": "unknown option --ou; did you mean --out?",
    "report --oot page.html run": "unknown option --oot; did you mean --out?",
    "board --por 80": "unknown option --por; did you mean --port?",
    "board -x": "unrecognized arguments: -x; see python -m lit_ft board --help",
    "chat run --comp": "unknown option 'comp'; did you mean 'compare'?",
    "serve run --por 80": "unknown option 'por'; did you mean 'port'?",
    "parity run --ur x": "unknown option 'ur'; did you mean 'url'?",
    "parity run --path x": "unknown option 'path'; see --help for what there is",
    "evaluate run --task x": "unknown option 'task'; did you mean 'tasks'?",
    "bandwidth --device 2": "unknown option 'device'; did you mean 'devices'?",
    "export --ru run": "unknown option 'ru'; did you mean 'run'?",
    "convert data --pat x": "unknown option 'pat'; did you mean 'path'?",
    "convert data --data.path x": "unknown option 'data.path'; did you mean 'path'?",
    "convert data --max_length 5": "unknown option 'max_length'; see --help for what there is",
    "convert data rows.json": "'rows.json' belongs to no option; name data with --path rows.json",
    "convert model --fro hf x": "unknown option 'fro'; did you mean 'from'?",
}


def test_options_that_another_class_does_not_have_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lora = "{class_path: peft.LoraConfig, init_args: {r: 16, target_modules: [q_proj]}}"
    (tmp_path / "a.yaml").write_text(f"model: {{pretrained: none, peft: {lora}}}\n")
    with pytest.warns(UserWarning, match="takes the place of") as caught:
        run(capsys, "fit", "--config", "a.yaml", "--model.peft", "peft.IA3Config", "--data.path", "none", code=2)
    assert {str(one.message) for one in caught if "takes the place" in str(one.message)} == {
        "peft.IA3Config takes the place of peft.LoraConfig, whose options r=16 it does not have: dropped"
    }


@pytest.mark.parametrize("typed", TYPED)
def test_one_line_that_says_what_to_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart.yaml").write_text("trainer: {max_steps: 1}\n")
    (line,) = run(capsys, *shlex.split(typed), code=2).splitlines()
    assert line.startswith("lit_ft: error: ")
    assert TYPED[typed].replace("{here}", str(tmp_path)) in line


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("max_epoch", "did you mean 'trainer.max_epochs'?"),
        ("accumulate_grad_batch", "did you mean 'trainer.accumulate_grad_batches'?"),
        ("foobar", "see --help for what there is"),
    ],
)
def test_an_unknown_option_of_the_trainer_in_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, advice: str
) -> None:
    (tmp_path / "own.yaml").write_text(f"trainer: {{{option}: 1}}\n")
    said = run(capsys, "fit", "--config", str(tmp_path / "own.yaml"), code=2)
    assert f"unknown option {option!r}; {advice}" in said


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("chat ./none", "path='./none' does not exist"),
        ("convert model --from hf --to megatron ./none --out out", "path='./none' does not exist"),
        ("convert model --from megatron --to hf x --like ./none --out out", "--like='./none' does not exist"),
        ("convert data --path rows.json --tokenizer ./none --out out", "--tokenizer='./none' does not exist"),
        ("export --adapter adapter --base ./none --out out", "--base='./none' does not exist"),
        ("export --adapter adapter --out out", "the base that adapter records='./gone' does not exist"),
        ("chat adapter", "the base that adapter records='./gone' does not exist"),
    ],
)
def test_a_wrong_path_is_called_what_it_was_typed_as(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter").mkdir()
    config = '{"peft_type": "LORA", "base_model_name_or_path": "./gone", "r": 4}'
    (tmp_path / "adapter" / "adapter_config.json").write_text(config)
    lines = run(capsys, *typed.split(), code=2)
    assert message in lines
    assert "model.pretrained" not in lines
