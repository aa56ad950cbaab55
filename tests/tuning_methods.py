"""A config for each row of the table of tuning methods, for the models of these tests."""

import peft
from peft.tuners.lora.config import ArrowConfig, BdLoraConfig, CordaConfig, VeloraConfig

from lit_ft.tuning.bottleneck import BottleneckConfig
from lit_ft.tuning.compatibility import refusal

CAUSAL = {"task_type": "CAUSAL_LM"}
LAYERS = {"target_modules": ["q_proj", "v_proj"]}
METHODS: dict[str, peft.PeftConfig] = {
    "LoRA": peft.LoraConfig(r=4, **LAYERS, **CAUSAL),
    "rsLoRA": peft.LoraConfig(r=4, use_rslora=True, **LAYERS, **CAUSAL),
    "DoRA": peft.LoraConfig(r=4, use_dora=True, **LAYERS, **CAUSAL),
    "PiSSA": peft.LoraConfig(r=4, init_lora_weights="pissa", **LAYERS, **CAUSAL),
    "OLoRA": peft.LoraConfig(r=4, init_lora_weights="olora", **LAYERS, **CAUSAL),
    "LoHa": peft.LoHaConfig(r=4, **LAYERS, **CAUSAL),
    "LoKr": peft.LoKrConfig(r=4, **LAYERS, **CAUSAL),
    "PiSSA, fast": peft.LoraConfig(r=4, init_lora_weights="pissa_niter_4", **LAYERS, **CAUSAL),
    "CorDA": peft.LoraConfig(
        r=4, init_lora_weights="corda", corda_config=CordaConfig(verbose=False), **LAYERS, **CAUSAL
    ),
    "LoRA-GA": peft.LoraConfig(
        r=4, init_lora_weights="lora_ga", lora_ga_config=peft.LoraGAConfig(), **LAYERS, **CAUSAL
    ),
    "EVA": peft.LoraConfig(r=4, init_lora_weights="eva", eva_config=peft.EvaConfig(rho=3.0), **LAYERS, **CAUSAL),
    "orthogonal": peft.LoraConfig(r=4, init_lora_weights="orthogonal", **LAYERS, **CAUSAL),
    "KaSA": peft.LoraConfig(r=4, kasa_config=peft.KasaConfig(), **LAYERS, **CAUSAL),
    "VeLoRA": peft.LoraConfig(r=4, velora_config=VeloraConfig(init_type="random", num_groups=4), **LAYERS, **CAUSAL),
    "BD-LoRA": peft.LoraConfig(
        r=4,
        use_bdlora=BdLoraConfig(target_modules_bd_a=["v_proj"], target_modules_bd_b=["q_proj"], nblocks=2),
        **LAYERS,
        **CAUSAL,
    ),
    "AdaLoRA": peft.AdaLoraConfig(init_r=6, target_r=3, tinit=1, tfinal=1, total_step=4, **LAYERS, **CAUSAL),
    "IA3": peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL
    ),
    "OFT": peft.OFTConfig(oft_block_size=4, target_modules=["q_proj"], **CAUSAL),
    "BOFT": peft.BOFTConfig(boft_block_size=4, target_modules=["q_proj"], **CAUSAL),
    "VeRA": peft.VeraConfig(r=4, target_modules=["q_proj"], **CAUSAL),
    "FourierFT": peft.FourierFTConfig(n_frequency=20, target_modules=["q_proj"], **CAUSAL),
    "LN tuning": peft.LNTuningConfig(target_modules=["input_layernorm"], **CAUSAL),
    "HRA": peft.HRAConfig(r=4, target_modules=["q_proj"], **CAUSAL),
    "MiSS": peft.MissConfig(r=4, target_modules=["q_proj"], **CAUSAL),
    "RandLoRA": peft.RandLoraConfig(r=4, target_modules=["q_proj"], **CAUSAL),
    "PVeRA": peft.PveraConfig(r=4, target_modules=["q_proj"], **CAUSAL),
    "TinyLoRA": peft.TinyLoraConfig(r=4, **LAYERS, **CAUSAL),
    "UniLoRA": peft.UniLoraConfig(r=4, **LAYERS, **CAUSAL),
    "VB-LoRA": peft.VBLoRAConfig(r=4, num_vectors=16, vector_length=4, **LAYERS, **CAUSAL),
    "GraLoRA": peft.GraloraConfig(r=4, **LAYERS, **CAUSAL),
    "GLoRA": peft.GloraConfig(r=4, **LAYERS, **CAUSAL),
    "DeLoRA": peft.DeloraConfig(r=4, **LAYERS, **CAUSAL),
    "DEFT": peft.DeftConfig(r=4, **LAYERS, **CAUSAL),
    "HiRA": peft.HiraConfig(r=4, **LAYERS, **CAUSAL),
    "PSOFT": peft.PsoftConfig(r=4, **LAYERS, **CAUSAL),
    "PEANuT": peft.PeanutConfig(r=4, **LAYERS, **CAUSAL),
    "RoAd": peft.RoadConfig(group_size=8, **LAYERS, **CAUSAL),
    "SHiRA": peft.ShiraConfig(r=4, **LAYERS, **CAUSAL),
    "C3A": peft.C3AConfig(block_size=4, **LAYERS, **CAUSAL),
    "WaveFT": peft.WaveFTConfig(n_frequency=20, **LAYERS, **CAUSAL),
    "OSF": peft.OSFConfig(**LAYERS, **CAUSAL),
    "BEFT": peft.BeftConfig(**LAYERS, **CAUSAL),
    "Supertuning": peft.SupertuningConfig(**LAYERS, **CAUSAL),
    "AdaMSS": peft.AdamssConfig(r=8, num_subspaces=2, **LAYERS, **CAUSAL),
    "bottleneck": BottleneckConfig(target_modules=["o_proj", "down_proj"], bottleneck_size=8, **CAUSAL),
    "LLaMA-Adapter": peft.AdaptionPromptConfig(adapter_len=5, adapter_layers=2, **CAUSAL),
    "trainable tokens": peft.TrainableTokensConfig(token_indices=[3, 4, 5], **CAUSAL),
    "prompt tuning": peft.PromptTuningConfig(num_virtual_tokens=5, **CAUSAL),
    "P-tuning": peft.PromptEncoderConfig(num_virtual_tokens=5, encoder_hidden_size=16, **CAUSAL),
    "prefix tuning": peft.PrefixTuningConfig(num_virtual_tokens=5, **CAUSAL),
}
ON_QUANTIZED_ONLY: dict[str, peft.PeftConfig] = {
    "LoftQ": peft.LoraConfig(
        r=4, lora_alpha=8, init_lora_weights="loftq", loftq_config={"loftq_bits": 4}, **LAYERS, **CAUSAL
    )
}
PARAMETERS: dict[str, peft.PeftConfig] = {
    "LoRA on parameters": peft.LoraConfig(r=4, target_parameters=["down_proj.weight"], **LAYERS, **CAUSAL),
}
"""Meant for fused experts; tests/tuning/test_expert_lora.py trains those."""
TOKENS: dict[str, peft.PeftConfig] = {
    "LoRA and token rows": peft.LoraConfig(r=4, trainable_token_indices=[3, 4], **LAYERS, **CAUSAL),
}
"""What ``model.added_tokens`` makes of LoRA."""
NOT_COMBINED: dict[str, peft.PeftConfig] = {
    "LoRA and full layers": peft.LoraConfig(r=4, modules_to_save=["norm"], **LAYERS, **CAUSAL),
    "LoRA and biases": peft.LoraConfig(r=4, bias="lora_only", **LAYERS, **CAUSAL),
    "LoRA with biases of its own": peft.LoraConfig(r=4, lora_bias=True, **LAYERS, **CAUSAL),
}
"""Options that matter where adapters are weighted or combined."""
NOT_TRAINED: dict[str, peft.PeftConfig] = {
    "MiCA": peft.LoraConfig(r=4, init_lora_weights="mica", **LAYERS, **CAUSAL),
    "activated LoRA": peft.LoraConfig(r=4, alora_invocation_tokens=[3], **LAYERS, **CAUSAL),
    "Arrow": peft.LoraConfig(r=4, arrow_config=ArrowConfig(), **LAYERS, **CAUSAL),
    "MonteCLoRA": peft.LoraConfig(r=4, monteclora_config=peft.MontecloraConfig(), **LAYERS, **CAUSAL),
    "VeLoRA, averages": peft.LoraConfig(r=4, velora_config=VeloraConfig(num_groups=4), **LAYERS, **CAUSAL),
    "AdaMSS, adaptive": peft.AdamssConfig(r=8, num_subspaces=2, use_asa=True, **LAYERS, **CAUSAL),
    "X-LoRA": peft.XLoraConfig(hidden_size=48, adapters={"a": "a"}, **CAUSAL),
    "Poly": peft.PolyConfig(**LAYERS, **CAUSAL),
    "multitask prompt tuning": peft.MultitaskPromptTuningConfig(num_virtual_tokens=5, num_tasks=2, **CAUSAL),
    "CPT": peft.CPTConfig(cpt_token_ids=[3], cpt_mask=[1], cpt_tokens_type_mask=[1], **CAUSAL),
    "Cartridge": peft.CartridgeConfig(num_virtual_tokens=5, **CAUSAL),
    "Shadow": peft.ShadowConfig(**CAUSAL),
    "Lily": peft.LilyConfig(r=4, **LAYERS, **CAUSAL),
    "FRoD": peft.FrodConfig(**LAYERS, **CAUSAL),
}
"""Methods and options that are refused in every situation."""


def works(method: str, situation: str) -> bool:
    """Whether the table lets a method run in a situation."""
    return refusal({**METHODS, **ON_QUANTIZED_ONLY}[method], situation) is None
