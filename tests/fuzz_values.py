"""Values that replace valid ones in fuzzed recipes and files."""

import math
from typing import Any

TEXTS = [
    "",
    " ",
    "~",
    "null",
    "nan",
    ".inf",
    "1e400",
    "-1",
    "0x10",
    "1_000",
    "True",
    "auto",
    "last",
    "红🙂",
    "e\u0301",
    "\x1b[31m",
    "a\nb",
    "\x00",
    "../../x",
    "/dev/null",
    "/proc/self/mem",
    "/",
    ".",
    "x" * 3000,
    "$(id)",
    "${oc.env:HOME}",
    "{}",
    "[]",
    "{a: 1}",
    "a.b.c",
    "torch",
    "torch.nn.Linear",
    "lit_ft.CausalLM",
    "'",
    '"',
    "%s",
    "{0}",
    "[/b]",
    "$\\frac{$",
    "-",
    "--",
    "?",
    "*",
    "[",
    "&a",
]
NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    0.5,
    -0.5,
    1.5,
    1e-30,
    1e30,
    1e308,
    2**31,
    2**63,
    -(2**63),
    10**30,
    math.nan,
    math.inf,
    -math.inf,
    True,
    False,
]
OTHERS: list[Any] = [
    None,
    [],
    {},
    [[]],
    [None],
    [1, 2],
    ["a", "b"],
    {"a": 1},
    {1: 2},
    {None: 1},
    {"": ""},
    {"class_path": "a"},
    {"init_args": {}},
    {"class_path": 1},
    {"class_path": "torch.optim.SGD"},
    {"class_path": "torch.optim.SGD", "init_args": {"lr": "a"}},
    {"__path__": "a"},
    {"class_path": None, "init_args": None},
    [{"class_path": "lit_ft.ExactMatch", "init_args": [1]}],
]
CLASSES = """
    torch.optim.SGD torch.optim.LBFGS torch.optim.SparseAdam torch.optim.Muon torch.optim.Optimizer torch.nn.Linear
    torch.optim.lr_scheduler.ReduceLROnPlateau torch.optim.lr_scheduler.OneCycleLR torch.optim.lr_scheduler.LambdaLR
    torch.optim.lr_scheduler.SequentialLR lit_ft.schedules.CosineWithWarmup lit_ft.schedules.Missing lit_ft.CausalLM
    lit_ft.TextDataModule lit_ft.ExactMatch lit_ft.strategies.FSDPStrategy lit_ft.strategies.ModelParallelStrategy
    lit_ft.precision.Float8Precision lit_callbacks.LossLedger lit_callbacks.SampleGenerations
    lit_callbacks.SpikeGuard lit_callbacks.ForgettingProbe lit_callbacks.MemoryProfiler lit_callbacks.AdapterMerger
    lit_callbacks.GracefulStop lightning.pytorch.callbacks.EarlyStopping lightning.pytorch.callbacks.ModelCheckpoint
    lightning.pytorch.callbacks.Timer lightning.pytorch.callbacks.GradientAccumulationScheduler
    lightning.pytorch.callbacks.StochasticWeightAveraging lightning.pytorch.callbacks.BatchSizeFinder
    lightning.pytorch.callbacks.LearningRateFinder lightning.pytorch.Callback lightning.pytorch.loggers.CSVLogger
    lightning.pytorch.strategies.DDPStrategy lightning.pytorch.strategies.DeepSpeedStrategy
    lightning.pytorch.plugins.MixedPrecision lightning.pytorch.profilers.SimpleProfiler
    lightning.pytorch.LightningModule lightning.pytorch.demos.boring_classes.BoringModel
    lightning.pytorch.demos.boring_classes.BoringDataModule peft.LoraConfig peft.AdaLoraConfig peft.IA3Config
    peft.PromptTuningConfig peft.PrefixTuningConfig peft.VeraConfig peft.OFTConfig peft.BOFTConfig peft.LoHaConfig
    peft.FourierFTConfig peft.PeftConfig peft.LoraModel peft.XLoraConfig peft.PolyConfig peft.VBLoRAConfig
    peft.LNTuningConfig peft.HRAConfig peft.BoneConfig peft.TrainableTokensConfig transformers.BitsAndBytesConfig
    transformers.GPTQConfig transformers.TorchAoConfig transformers.Trainer transformers.AutoModelForCausalLM
    schedulefree.SGDScheduleFree bitsandbytes.optim.Adam8bit torchmetrics.MeanMetric lit_ft lit_ft. .CausalLM
    CausalLM lit_ft.training.causal_lm lit_ft.model.loading.load_base torch.optim Trainer ddp
""".split()
"""Names of classes, of other objects and of nothing, in packages whose code may run."""
