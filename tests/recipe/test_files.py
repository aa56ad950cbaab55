"""Recipe files and the order of the command line."""

import io
import os
import re
from pathlib import Path

import pytest
import yaml
from command_line import recipe
from jsonargparse import Namespace

from lit_ft import RecipeError
from lit_ft.cli import main
from lit_ft.commands.sweep import TrialCLI
from lit_ft.recipe.files import check_files, expand_home, read_once, read_pipes


def test_items_of_a_list_get_nothing_of_those_of_an_earlier_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model_folder: str
) -> None:
    """A list replaces an earlier one, also one of the same length with items that have the same options."""
    given = recipe(tmp_path, model_folder, "rows.json")
    lists = {
        "before.yaml": (
            "[{class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: train/loss, mode: max}}]",
            "[{path: a.json, weight: 0.7, name: ours}, {path: b.json, weight: 0.3}]",
        ),
        "after.yaml": (
            "[{class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {save_top_k: 2}}]",
            "[{path: c.json}, {path: d.json, weight: 2}]",
        ),
    }
    for name, (callbacks, sources) in lists.items():
        (tmp_path / name).write_text(f"trainer: {{callbacks: {callbacks}}}\ndata: {{sources: {sources}}}\n")
        given += ["--config", str(tmp_path / name)]
    with pytest.raises(SystemExit):
        main([*given, "--data.path", "null", "--print_config"])
    parsed = yaml.safe_load(capsys.readouterr().out)
    (callback,) = parsed["trainer"]["callbacks"]
    assert callback["class_path"].endswith("ModelCheckpoint")
    options = {"monitor": None, "mode": "min", "save_top_k": 2}
    assert {name: callback["init_args"][name] for name in options} == options
    sources = parsed["data"].get("init_args", parsed["data"])["sources"]
    assert [(one["path"], one["weight"], one["name"]) for one in sources] == [
        ("c.json", None, None),
        ("d.json", 2, None),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "a: &b {c: 1}\nd: *b\ne: *b\n",  # the same node twice is no repeated key
        "base: &base {x: 1}\none: {<<: *base, y: 2}\n",
        "a: {path: x}\nb: {path: y}\n",
        "a: [{path: x}, {path: y}]\n",
        "lr_scheduler: null\n",
        "data: {system: \uff1a}\n",
        "temperature: 0.7\ntop_p: 0.9\ntop_k: 20\n",  # of predict
        "model: {gradient_checkpointing: true}\noptimizer: {lr: 1, weight_decay: 1}\nlr_scheduler: {warmup: 1}\n",
    ],
)
def test_good_files(text: str, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(text)
    check_files(["fit", "--config", str(tmp_path / "good.yaml")])


OTHER_RECIPE = "model_name_or_path: x\nlora_rank: 8\nstage: sft\ncutoff_len: 9\n"
WRONG: dict[str, tuple[str, str, str]] = {
    "an inner key twice": ("a.yaml", "data:\n  path: a\n  path: b", "a.yaml:3: 'path' stands in line 2 already"),
    "an entry for an anchor": (
        "a.yaml",
        "x-defaults: &d {path: a}\ndata: {<<: *d}",
        "a.yaml:1: 'x-defaults' is no option; a recipe has no place for anchors alone: write &NAME where the value",
    ),
    "a hidden entry for an anchor": ("a.yaml", ".d: &d {path: a}\ndata: {<<: *d}", "a.yaml:1: '.d' is no option"),
    "an optimizer of the model": (
        "a.yaml",
        "model:\n  pretrained: a\n  optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}",
        "a.yaml:3: optimizer under model would have no effect; put it at the top level, beside model",
    ),
    "a schedule of a model with a class": (
        "a.yaml",
        "model:\n  class_path: a.B\n  init_args:\n    optimizer: null\n    lr_scheduler: {class_path: c.D}",
        "a.yaml:5: lr_scheduler under model would have no effect",
    ),
    "a list": ("a.yaml", "- a\n- b", "a.yaml: holds a list; a recipe is a mapping, e.g. data: {path: rows.json}"),
    "rows in lines": ("rows.jsonl", '{"text": "a"}\n{"text": "b"}\n', "a recipe is YAML; name data with --data.path "),
    "rows": ("rows.json", '[{"text": "a"}]', "holds a list; a recipe is a mapping, name data with --data.path "),
    "one value": ("a.yaml", "3", "a.yaml: holds one value; a recipe is a mapping"),
    "an open bracket": (
        "a.yaml",
        "model:\n  pretrained: [a\n",
        "a.yaml:3: is no YAML (did not find expected ',' or ']')",
    ),
    "a tab": (
        "a.yaml",
        "model:\n\tpretrained: a\n",
        ":2: is no YAML (found character that cannot start any token); indent",
    ),
    "a backslash": (
        "a.yaml",
        'data:\n  path: "C:\\data"',
        ":2: is no YAML (found unknown escape character); in double quotes",
    ),
    "two documents": ("a.yaml", "a: 1\n---\nb: 2", "a recipe is one document; take out the line ---"),
    "an unknown reference": ("a.yaml", "data: {path: *x}", "put a text that begins with * in quotes"),
    "a star": ("a.yaml", "data: {path: *.json}", "put a text that begins with * in quotes"),
    "the config of a model": (
        "config.json",
        '{"model_type": "qwen2"}',
        "is the config of a model, no recipe; name its folder: ",
    ),
    "the config of a tokenizer": ("t.json", '{"tokenizer_class": "T"}', "is the config of a tokenizer, no recipe"),
    "the config of an adapter": ("a.json", '{"peft_type": "LORA"}', "is the config of an adapter, no recipe"),
    "a list of data sets": (
        "dataset_info.json",
        '{"mine": {"file_name": "rows.json"}}',
        "is LLaMA-Factory's list of data sets, no recipe; name the file of one: --data.path ",
    ),
    "a recipe of another trainer": (
        "sft.yaml",
        OTHER_RECIPE,
        "begin with recipes/qwen.yaml. Here model_name_or_path = model.pretrained, lora_rank = model.peft.r, "
        "cutoff_len = data.max_length; leave out stage",
    ),
    "preference training of another trainer": (
        "dpo.yaml",
        OTHER_RECIPE.replace("sft", "dpo"),
        "leave out stage; for preference tuning add --config recipes/preference/dpo.yaml (docs/preferences.md)",
    ),
    "SimPO of LLaMA-Factory": (
        "dpo.yaml",
        OTHER_RECIPE.replace("sft", "dpo") + "pref_loss: simpo\npref_beta: 2\nsimpo_gamma: 1\n",
        "pref_loss = model.objective, pref_beta = model.objective.beta, simpo_gamma = gamma of the class lit_ft.SimPO; "
        "leave out stage; for preference tuning add --config recipes/preference/simpo.yaml",
    ),
    "the usual loss of LLaMA-Factory": (
        "dpo.yaml",
        OTHER_RECIPE.replace("sft", "dpo") + "pref_loss: sigmoid\n",
        "add --config recipes/preference/dpo.yaml",
    ),
    "IPO of Axolotl": (
        "ipo.yaml",
        "base_model: x\nrl: dpo\ndpo_loss_type: [ipo]\nrl_beta: 0.1\n",
        "rl_beta = model.objective.beta; leave out rl; for preference tuning add --config recipes/preference/ipo.yaml",
    ),
    "KTO of LLaMA-Factory": (
        "kto.yaml",
        OTHER_RECIPE.replace("sft", "kto") + "pref_beta: 0.1\nkto_rejected_weight: 2.0\n",
        "pref_beta = model.objective.beta, kto_rejected_weight = model.objective.undesirable_weight of lit_ft.KTO; "
        "leave out stage; for preference tuning add --config recipes/preference/kto.yaml (docs/preferences.md)",
    ),
    "KTO of Axolotl": (
        "kto.yaml",
        "base_model: x\nrl: kto\nrl_beta: 0.1\nkto_desirable_weight: 0.2\n",
        "kto_desirable_weight = model.objective.desirable_weight of lit_ft.KTO; leave out rl; for preference tuning "
        "add --config recipes/preference/kto.yaml",
    ),
    "a loss of ms-swift that is not here": (
        "dpo.yaml",
        "model: x\nrlhf_type: dpo\nloss_type: hinge\nref_adapters: y\n",
        "; leave out rlhf_type, ref_adapters; there is no loss_type: hinge here, of preference tuning there are dpo, "
        "ipo, kto, orpo, simpo (docs/preferences.md); take one of these, or keep that trainer for this step",
    ),
    "GRPO of ms-swift": (
        "grpo.yaml",
        "model: x\nrlhf_type: grpo\nlearning_rate: 1.0e-6\ntorch_dtype: bfloat16\nbeta: 0.04\ntemperature: 0.9\n",
        "leave out rlhf_type, temperature; for policy optimization add --config recipes/policy/grpo.yaml (docs/",
    ),
    "Dr. GRPO of Axolotl": (
        "grpo.yaml",
        "base_model: x\nrl: grpo\ntrl: {num_generations: 4, use_vllm: true, loss_type: dr_grpo, beta: 0.0}\n",
        "Here base_model = model.pretrained, num_generations = model.answers_per_prompt of lit_ft.PolicyLM, loss_type "
        "= model.algorithm, beta = model.kl_weight; leave out rl, use_vllm; for policy optimization add --config "
        "recipes/policy/grpo.yaml"
        " --model.algorithm lit_ft.DrGRPO (docs/policy.md)",
    ),
    "RLOO of ms-swift": (
        "rloo.yaml",
        "model: x\nrlhf_type: grpo\ndelta: null\nadvantage_estimator: rloo\nlora_rank: 8\nloss_type: grpo\n",
        "; for policy optimization add --config recipes/policy/grpo.yaml --model.algorithm lit_ft.RLOO (docs/policy.md",
    ),
    "GRPO of TRL, whose files do not name the trainer": (
        "grpo.yaml",
        "model_name_or_path: x\nreward_funcs: [accuracy_reward]\nreward_weights: [1.0]\nmax_completion_length: 64\n",
        "Here model_name_or_path = model.pretrained, reward_funcs = model.rewards of lit_ft.PolicyLM, reward_weights = "
        "model.reward_weights of lit_ft.PolicyLM, max_completion_length = model.max_new_tokens; for policy opt",
    ),
    "a loss of TRL that is not here": (
        "grpo.yaml",
        "model_name_or_path: x\nreward_funcs: [a.b]\nper_device_train_batch_size: 4\nloss_type: cispo\n",
        "per_device_train_batch_size = data.micro_batch_size times model.answers_per_prompt, loss_type = "
        "model.algorithm; there is no loss_type: cispo here, of policy optimization there are dapo, dr_grpo, grpo, "
        "rloo "
        "(docs/policy.md); take one of these",
    ),
    "GKD of TRL, whose files do not name the trainer": (
        "gkd.yaml",
        "model_name_or_path: x\nteacher_model_name_or_path: y\nlmbda: 1\nbeta: 0.5\ntemperature: 0.9\nseq_kd: false\n",
        "teacher_model_name_or_path = model.teacher of lit_ft.DistillationLM, lmbda = model.on_policy of lit_ft.On"
        "PolicyDistillationLM, beta = model.divergence; leave out seq_kd, temperature; for distillation add --config "
        "recipes/distillation/on_policy.yaml --model.divergence lit_ft.JensenShannon --model.divergence.beta 0.5",
    ),
    "TRL's other trainer of distillation, whose batches count answers": (
        "distillation.yaml",
        "model_name_or_path: x\nteacher_model_name_or_path: y\nnum_generations: 4\nbeta: 1.0\ntemperature: 2.0\n"
        "per_device_train_batch_size: 8\n",
        "num_generations = model.answers_per_prompt, per_device_train_batch_size = data.micro_batch_size times model."
        "answers_per_prompt, temperature = model.divergence.temperature, beta = model.divergence; for distillation add "
        "--config recipes/distillation/on_policy.yaml --model.divergence lit_ft.ReverseKL (docs/distillation.md)",
    ),
    "GKD of ms-swift": (
        "gkd.yaml",
        "model: x\nrlhf_type: gkd\nteacher_model: y\nsft_alpha: 0.1\ntemperature: 1.0\ngkd_logits_topk: 64\n",
        "sft_alpha = model.kd_ratio of lit_ft.DistillationLM, temperature = model.divergence.temperature, model = "
        "model.pretrained; leave out rlhf_type, gkd_logits_topk; for distillation add --config recipes/distillation/"
        "on_policy.yaml (docs/distillation.md)",
    ),
    "GKD of ms-swift on the answers of the data": (
        "gkd.yaml",
        "model: x\nrlhf_type: gkd\nteacher_model: y\nlmbda: 0\nbeta: 0\n",
        "; leave out rlhf_type, lmbda; for distillation add --model lit_ft.DistillationLM --model.teacher NAME "
        "--model.divergence lit_ft.ForwardKL (docs/distillation.md)",
    ),
    "GRPO of ms-swift whose only reward is a teacher": (
        "opd.yaml",
        "model: x\nrlhf_type: grpo\nteacher_model: y\nteacher_kl_coef: 1.0\nbeta: 0.0\nreward_funcs: null\n",
        "leave out rlhf_type, teacher_kl_coef, beta; for distillation add --config recipes/distillation/on_policy.yaml "
        "(docs/distillation.md)",
    ),
    "GRPO of ms-swift with a teacher beside its rewards": (
        "grpo.yaml",
        "model: x\nrlhf_type: grpo\nteacher_model: y\nreward_funcs: [accuracy]\nbeta: 0.0\n",
        "; for policy optimization add --config recipes/policy/grpo.yaml (docs/policy.md)",
    ),
    "DPO of ms-swift, which ignores a teacher": (
        "dpo.yaml",
        "model: x\nrlhf_type: dpo\nteacher_model: y\nlearning_rate: 1.0e-6\n",
        "; for preference tuning add --config recipes/preference/dpo.yaml",
    ),
    "GRPO of ms-swift without a teacher": (
        "grpo.yaml",
        "model: x\nrlhf_type: grpo\nteacher_model: null\nlearning_rate: 1.0e-6\n",
        "; for policy optimization add --config recipes/policy/grpo.yaml (docs/policy.md)",
    ),
    "distillation of Axolotl": (
        "kd.yaml",
        "base_model: x\nkd_trainer: true\nkd_ce_alpha: 0.1\nkd_alpha: 0.9\nkd_temperature: 2.0\nkd_beta: 0.3\n",
        "kd_temperature = model.divergence.temperature of lit_ft.DistillationLM, kd_beta = model.divergence of lit_ft."
        "DistillationLM; for distillation add --model lit_ft.DistillationLM --model.teacher NAME --model.divergence "
        "lit_ft.JensenShannon --model.divergence.beta 0.3 (docs/distillation.md)",
    ),
    "distillation of torchtune": (
        "kd.yaml",
        "model: {_component_: torchtune.models.qwen2.lora_qwen2_0_5b}\nkd_loss: {_component_: torchtune.A}\n"
        "teacher_model: {_component_: torchtune.models.qwen2.qwen2_1_5b}\n",
        "Here kd_loss = model.divergence of lit_ft.DistillationLM, teacher_model = model.teacher of lit_ft."
        "DistillationLM, _component_ = class_path; for distillation add --model "
        "lit_ft.DistillationLM --model.teacher NAME (docs/distillation.md)",
    ),
    "distillation of NeMo AutoModel": (
        "kd.yaml",
        "model: {_target_: nemo.Model}\nteacher_model: {_target_: nemo.Model}\nkd_ratio: 0.5\nseparate_meshes: true\n"
        "kd_loss_fn: {_target_: nemo.KDLoss, temperature: 2.0}\n",
        "_target_ = class_path, temperature = model.divergence.temperature, kd_ratio = model.kd_ratio; leave out "
        "separate_meshes; for distillation add --model lit_ft.DistillationLM --model.teacher NAME (docs/",
    ),
    "an objective's beta in a file of TRL": (
        "dpo.yaml",
        "model_name_or_path: x\ndataset_name: y\nlearning_rate: 1.0e-6\nbeta: 0.1\n",
        "learning_rate = optimizer.lr, beta = model.objective.beta",
    ),
    "reinforcement learning that is not here": (
        "ppo.yaml",
        "model: x\nrlhf_type: ppo\nreward_model: y\nnum_ppo_epochs: 4\n",
        "leave out rlhf_type, num_ppo_epochs; there is no rlhf_type: ppo here, of preference tuning there are dpo, "
        "ipo, kto, orpo, simpo (docs/preferences.md), of policy optimization there are dapo, dr_grpo",
    ),
    "a reward model of LLaMA-Factory": (
        "rm.yaml",
        OTHER_RECIPE.replace("sft", "rm"),
        "leave out stage; there is no stage: rm here, of preference tuning there are dpo, ipo, kto, orpo, simpo",
    ),
    "a model of ms-swift": (
        "sft.yaml",
        "model: Qwen/Qwen2.5-0.5B\ntrain_type: lora\nlora_rank: 8\ntorch_dtype: bfloat16\n",
        "torch_dtype = model.dtype, model = model.pretrained",
    ),
    "a name and an author of ms-swift, which the model says": (
        "sft.yaml",
        "model: Qwen/Qwen2.5-0.5B\nmodel_name: Coco\nmodel_author: me\ninit_weights: pissa\nlora_rank: 8\n",
        "Here init_weights = model.peft.init_lora_weights, lora_rank = model.peft.r, model = model.pretrained; leave "
        "out model_name, model_author; fill the placeholders of the data ({{NAME}}, {{AUTHOR}}; docs/data.md)",
    ),
    "a model of Unsloth": (
        "sft.yaml",
        "model_name: unsloth/Qwen2.5-0.5B\nmax_seq_length: 9\nload_in_4bit: true\n",
        "Here model_name = model.pretrained, max_seq_length = data.max_length, load_in_4bit = model.quantization",
    ),
    "smoothed labels of DPO": (
        "dpo.yaml",
        "model: x\nrlhf_type: dpo\nlabel_smoothing: 0.1\nlearning_rate: 1.0e-6\nlora_rank: 8\n",
        "lora_rank = model.peft.r, label_smoothing = model.objective.label_smoothing of lit_ft.DPO, model = model."
        "pretrained; leave out rlhf_type; for preference tuning",
    ),
    "a recipe of Axolotl": (
        "qlora.yml",
        "base_model: x\nadapter: lora\nstrict: false\ntf32: true\nplugins: [axolotl.Plugin]\n",
        "Here base_model = model.pretrained, adapter = model.peft; leave out strict, tf32; nothing is known of plugins",
    ),
    "a recipe of torchtune, whose sections are called as ours": (
        "lora.yaml",
        "model: {_component_: torchtune.models.llama3_2.lora_llama3_2_1b, lora_rank: 64}\nepochs: 1\n",
        "begin with recipes/qwen.yaml. Here epochs = trainer.max_epochs",
    ),
    "a recipe of LitGPT": (
        "lora.yaml",
        "checkpoint_dir: x\nlora_r: 8\ndata: {class_path: litgpt.A}\ntrain: {local_batch_size: 8, epochs: 4}\n",
        "Here checkpoint_dir = model.pretrained or run_dir, lora_r = model.peft.r, local_batch_size = data.micro",
    ),
    "a recipe of ms-swift": (
        "sft.yaml",
        "tuner_type: lora\nlearning_rate: 1e-4\nlazy_tokenize: true\nmax_length: 9\ntarget_modules: all\nmetric: x\n",
        "Here tuner_type = model.peft, learning_rate = optimizer.lr, max_length = data.max_length, target_modules = "
        "model.peft.target_modules; leave out lazy_tokenize; nothing is known of metric",
    ),
    "a recipe of verl": (
        "sft.yaml",
        "data: {train_files: a, max_length: 9}\nmodel: {partial_pretrain: x, use_liger: true}\ntrainer: {nnodes: 1}\n",
        "Here train_files = data.path, partial_pretrain = model.pretrained, use_liger = model.liger, nnodes = trainer",
    ),
    "a recipe of NeMo AutoModel": (
        "squad.yaml",
        "model: {_target_: nemo.Model}\npeft: {_target_: nemo.Peft, dim: 8}\nstep_scheduler: {local_batch_size: 8}\n",
        "Here _target_ = class_path, dim = model.peft.r, local_batch_size = data.micro_batch_size",
    ),
    "a recipe of torchtitan": (
        "llama3.toml",
        '[model]\nhf_assets_path = "x"\n[training]\nlocal_batch_size = 1\nsteps = 9\n',
        "Here hf_assets_path = model.pretrained, local_batch_size = data.micro_batch_size, steps = trainer.max_steps",
    ),
    "a parallel layout of torchtitan": (
        "llama3.toml",
        "[training]\nlocal_batch_size = 1\n[parallelism]\npipeline_parallel_degree = 2\ncontext_parallel_degree = 2\n",
        "Here local_batch_size = data.micro_batch_size, pipeline_parallel_degree = trainer.strategy, context_parallel",
    ),
    "a parallel layout of Axolotl": (
        "axolotl.yaml",
        "base_model: x\ndp_shard_size: 2\ndp_replicate_size: 2\ntensor_parallel_size: 2\n",
        "dp_replicate_size = trainer.strategy, tensor_parallel_size = an option of lit_ft.strategies.ModelParallel",
    ),
    "a configuration of DeepSpeed": (
        "zero2.json",
        '{"train_batch_size": "auto", "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 2}}',
        "is DeepSpeed's configuration, no recipe; it is an option of the strategy: --trainer.strategy lit_ft.strat",
    ),
    "two words of another trainer": (
        "a.yaml",
        "model_name_or_path: x\ndataset_name: y\n",
        "begin with recipes/qwen.yaml. Here model_name_or_path = model.pretrained, dataset_name = data.path",
    ),
    "an option beside its class": (
        "a.yaml",
        "optimizer:\n  class_path: torch.optim.AdamW\n  lr: 1.0e-4\n",
        "a.yaml:3: 'lr' stands beside class_path; put it under init_args: {lr: ...}",
    ),
    "a class as a key": (
        "a.yaml",
        "trainer:\n  callbacks+:\n    - lit_callbacks.LossLedger: {top: 3}\n",
        "a.yaml:3: callbacks+: 'lit_callbacks.LossLedger' is no class_path; write class_path: lit_callbacks.Loss",
    ),
    "a key without a space": (
        "a.yaml",
        "model:pretrained: x",
        ":1: 'model:pretrained' is one text; put a space after the",
    ),
    "a template": (
        "a.yaml",
        "data:\n  path: {{ data }}",
        ":2: a mapping or a list stands as a key; recipes have no templates such as {{ name }}",
    ),
    "a section without options": (
        "a.yaml",
        "data: {path: a}\ntrainer:\n",
        ":2: trainer is named without options; give",
    ),
    "data without options": ("a.yaml", "data:\ntrainer: {max_epochs: 1}\n", ":1: data is named without options; give"),
    "a list beside what is added to it": (
        "a.yaml",
        "trainer:\n  callbacks: [{class_path: A}]\n  callbacks+: [{class_path: B}]\n",
        ":3: 'callbacks' and 'callbacks+' stand side by side; put all in one list",
    ),
    "no value": ("a.yaml", "optimizer:\n", "a.yaml: gives no value; write null for none, e.g. optimizer: null"),
    "a tag": (
        "a.yaml",
        "data:\n  system: !important x\n",
        ":2: is no YAML (could not determine a constructor for the tag '!important'); put a text that begins with ! in",
    ),
    "a full-width colon within a section": (
        "a.yaml",
        "trainer:\n  max_epochs\uff1a 3\n",
        ":2: 'max_epochs\uff1a 3' is one text; write an ASCII colon and a space in place of \uff1a",
    ),
    "a full-width colon after a section": (
        "a.yaml",
        "trainer\uff1a\n  max_epochs: 3\n",
        ":2: is no YAML (mapping values ",
    ),
    "a full-width colon after a value": (
        "a.yaml",
        "data:\n  path: a.json\n  max_length\uff1a 3\n",
        "write an ASCII colon and a space in place of \uff1a",
    ),
    "spaces of a web page": (
        "a.yaml",
        "trainer:\n\u00a0\u00a0max_epochs: 3\n",
        ":2: the key '\\xa0\\xa0max_epochs' has a space of another kind (U+00A0); type ordinary spaces",
    ),
    "a value without a space": (
        "a.yaml",
        "data:\n  path:a.json",
        ":2: 'path:a.json' is one text; put a space after the",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_file(name: str, tmp_path: Path) -> None:
    file, text, message = WRONG[name]
    (tmp_path / file).write_text(text)
    with pytest.raises(RecipeError) as refused:
        check_files(["fit", "--config", str(tmp_path / file)])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_refers_to_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").write_text("a: &a [*a]\n")
    with pytest.raises(ValueError, match="refers to itself"):
        check_files([f"--config={tmp_path / 'loop.yaml'}"])


def test_the_home_folder_in_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    data = Namespace(path="~/a.json", sources=[{"path": "~/b"}], system="a ~/c")
    options = Namespace(run_dir="~/runs", data=data, n=3)
    expand_home(options)
    assert options == Namespace(
        run_dir="/home/me/runs",
        data=Namespace(path="/home/me/a.json", sources=[{"path": "/home/me/b"}], system="a ~/c"),
        n=3,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {path: a, path: b}", "standard input:1: 'path' stands in line 1 already"),
        ("", "standard input: is empty; a recipe names at least"),
        ("# \udcff", r"--config -: is not UTF-8 \(byte 2\)"),
    ],
)
def test_the_standard_input_is_checked_as_a_file_is(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    with pytest.raises(RecipeError, match=message):
        check_files(["fit", "--config", "-"])


def test_a_recipe_of_the_standard_input_is_read_by_one_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_folder: str
) -> None:
    given = recipe(tmp_path, model_folder, "rows.json")
    text = Path(given[given.index("--config") + 1]).read_text(encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    with pytest.raises(SystemExit):
        main(["fit", "--config", "-", "--print_config"])
    assert "max_length: 96" in capsys.readouterr().out
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(RecipeError, match="only the first process of a run gets the standard input"):
        check_files(["fit", "--config=-"])


@pytest.mark.slow
def test_a_recipe_from_a_pipe_is_checked_as_a_file_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_folder: str
) -> None:
    given = recipe(tmp_path, model_folder, "rows.json")
    texts = {True: "data:\n  path: a\n  path: b\n", False: Path(given[given.index("--config") + 1]).read_text()}
    for is_refused, text in texts.items():
        source, sink = os.pipe()
        os.write(sink, text.encode())
        os.close(sink)
        name = f"/dev/fd/{source}"
        assert read_once(["fit", f"--config={name}"]) == name
        with pytest.raises(SystemExit):
            main(["fit", "--config", name, "--print_config"])
        os.close(source)
        told = capsys.readouterr()
        wanted = f"{name}:3: 'path' stands in line 2 already" if is_refused else "max_length: 96"
        assert wanted in (told.err if is_refused else told.out)
    assert TrialCLI(["--config", texts[False]], builds=False).recipe_name == "run"
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(RecipeError, match="only the first process of a run gets a pipe"):
        read_pipes(["fit", "--config", "/dev/fd/63"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "data:\n  path: a\n  path: b"], "--config TEXT:3: 'path' stands in line 2 already"),
        (["--config={model_name_or_path: x}"], "Here model_name_or_path = model.pretrained"),
        (["--model.optimizer", "torch.optim.SGD"], "--model.optimizer would have no effect: write --optimizer"),
        (
            ["--model.init_args.lr_scheduler.warmup=2"],
            "--model.init_args.lr_scheduler.warmup would have no effect: write --lr_scheduler.warmup",
        ),
        (["--data", "{path: a, path: b}"], "--data: 'path' stands twice in its value; keep one"),
        (["--data.sources=[{path: a, path: b}]"], "--data.sources: 'path' stands twice in its value; keep one"),
    ],
)
def test_texts_of_the_command_line_are_checked_as_files_are(arguments: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        check_files(["fit", *arguments])
