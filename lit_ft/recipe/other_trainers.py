"""Options and short names of other trainers, each with its equivalent in a recipe of lit_ft."""

import lit_ft
from lit_ft import strategies

OPTIONS = {
    theirs: ours
    for ours, words in {
        "class_path, with the options under init_args": "_component_ _target_",
        "model.gradient_checkpointing": (
            "activation_checkpointing disable_gradient_checkpointing enable_activation_checkpointing "
            "enable_gradient_checkpointing gradient_checkpointing use_gradient_checkpointing"
        ),
        "model.activation_offload": "activation_offloading enable_activation_offloading",
        "optimizer.betas": "adam_beta1 adam_beta2",
        "optimizer.eps": "adam_eps adam_epsilon",
        "model.peft, e.g. peft.LoraConfig": "adapter lora train_type tuner_type use_lora use_peft",
        "model.adapter, with model.peft: null": (
            "adapter_checkpoint adapter_name_or_path adapters lora_model_dir resume_only_model"
        ),
        "data.template_options, e.g. {enable_thinking: false}": (
            "add_non_thinking_prefix chat_template_kwargs enable_thinking"
        ),
        "model.added_special_tokens": "additional_special_tokens new_special_tokens",
        "model.peft.modules_to_save": "additional_target lora_modules_to_save",
        "model.algorithm of lit_ft.PolicyLM, e.g. lit_ft.RLOO": "advantage_estimator",
        "nothing: the chat template renders tools": "agent_template tool_format",
        "model.peft.lora_alpha": "alpha lora_alpha",
        "data.supervise (assistant)": (
            "answer_only_loss_mask completion_only_loss instruction_part response_part train_on_responses_only"
        ),
        "model.peft.target_modules": (
            "apply_lora_to_mlp apply_lora_to_output lora_attn_modules lora_head lora_key lora_mlp lora_projection "
            "lora_query lora_target lora_target_modules lora_value target_regex"
        ),
        "data.supervise (assistant; false: all)": "assistant_only_loss mask_prompt",
        "nothing: answers come from the weights that train": (
            "async_generate async_prefetch off_policy_mask_threshold off_policy_sequence_mask_delta rollout_func "
            "rollout_importance_sampling_mode rollout_importance_sampling_threshold sleep_level use_bias_correction_kl "
            "use_data_producer use_transformers_continuous_batching use_transformers_paged use_vllm "
            "vllm_data_parallel_size vllm_enable_expert_parallel vllm_enable_lora vllm_enable_prefix_caching "
            "vllm_enable_sleep_mode vllm_enforce_eager vllm_engine_kwargs vllm_gpu_memory_utilization vllm_group_port "
            "vllm_guided_decoding_regex vllm_importance_sampling_cap vllm_importance_sampling_clip_max "
            "vllm_importance_sampling_clip_min vllm_importance_sampling_correction vllm_importance_sampling_mode "
            "vllm_limit_mm_per_prompt vllm_lora_sync vllm_max_lora_rank vllm_max_model_len vllm_max_model_length "
            "vllm_max_num_seqs vllm_mode vllm_model_impl vllm_pipeline_parallel_size vllm_server_base_url "
            "vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex vllm_sync_frequency "
            "vllm_sync_interval vllm_tensor_parallel_size"
        ),
        "model.attn_implementation": "attention attention_implementation attn attn_impl attn_implementation",
        "resume: auto": "auto_resume_from_checkpoints",
        "nothing: the loss is the mean over the tokens of all devices": "average_tokens_across_devices",
        "model.pretrained": (
            "base_model checkpointer hf_assets_path model_id model_name model_name_or_path model_path partial_pretrain "
            "pretrained_model_name_or_path"
        ),
        "data.micro_batch_size (per device)": "batch_size",
        "data.micro_batch_tokens (tokens of an evaluation batch)": (
            "batch_size_val eval_batch_size per_device_eval_batch_size precompute_ref_batch_size"
        ),
        "trainer.precision (bf16-mixed) and model.dtype (bfloat16)": "bf16",
        "trainer.precision (bf16-true) and model.dtype (bfloat16)": "bfloat16 pure_bf16",
        "data.max_length": (
            "block_size cutoff_len max_seq_len max_seq_length model_max_length seq_len seq_length sequence_len"
        ),
        "model.quantization; see recipes/tuning/qlora_nf4.yaml": (
            "bnb_4bit_compute_dtype bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_config_kwargs "
            "double_quantization load_in_4bit quant_bits quant_method quantization_bit quantization_method "
            "quantization_type quantize"
        ),
        "data.shuffle_buffer": "buffer_size shuffle_buffer_size",
        "data.cache_dir": "cached_dataset dataset_prepared_path",
        "model.center_weight of lit_ft.RewardLM": "center_rewards_coefficient",
        "data.chat_template": "chat_template chat_template_jinja chat_template_path prompt_style",
        "model.pretrained or run_dir": "checkpoint_dir",
        "nothing: the folder of the model says which": "checkpoint_files",
        "every_n_train_steps of the callback lightning.pytorch.callbacks.ModelCheckpoint": (
            "ckpt_every_steps save_freq save_interval save_steps save_strategy saves_per_epoch"
        ),
        "trainer.gradient_clip_val": "clip_grad clip_grad_norm max_grad_norm max_norm",
        "nothing: there is no PPO": (
            "cliprange cliprange_value kl_coef num_ppo_epochs ppo_buffer_size ppo_epochs ppo_score_norm ppo_target "
            "ppo_whiten_rewards vf_coef whiten_rewards"
        ),
        "data.columns": "column_map column_mapping custom_dataset_info",
        "nothing: val/token_accuracy is logged": "compute_accuracy",
        "trainer.strategy; see recipes/strategies/context_parallel.yaml": (
            "context_parallel_degree context_parallel_size cp_size sequence_parallel_size "
            "ulysses_sequence_parallel_size"
        ),
        "data.columns, e.g. {messages: NAME}": "conversation_column field_messages",
        "data.format": "conversation_style data_format dataset_format",
        "nothing: a reward of this kind is a class of your own (model.rewards)": (
            "cosine_max_len cosine_max_len_value_correct cosine_max_len_value_wrong cosine_min_len_value_correct "
            "cosine_min_len_value_wrong repetition_max_penalty repetition_n_grams"
        ),
        "lr_scheduler.final_fraction (of optimizer.lr)": "cosine_min_lr_ratio lr_scheduler_kwargs min_lr min_lr_rate",
        "nothing: lit_ft.SimPO has no such term": "cpo_alpha",
        "nothing: last.ckpt is the newest checkpoint": "create_checkpoint_symlink",
        "nothing: model.adapter is trained further": "create_new_adapter",
        "trainer.strategy; see recipes/strategies/fsdp_hybrid.yaml": "data_parallel_replicate_degree dp_replicate_size",
        "trainer.strategy; see recipes/strategies/fsdp.yaml": (
            "data_parallel_shard_degree dp_shard_size fsdp fsdp_config fsdp_version"
        ),
        "seed_everything": "data_seed random_state seed",
        "nothing: one process writes the tokens, the others wait": "data_shared_file_system",
        "data.num_workers": "dataloader_num_workers",
        "nothing: batches are small": "dataloader_pin_memory",
        "nothing: batches are made ahead of the training": "dataloader_prefetch_factor",
        "data.path": (
            "dataset dataset_dir dataset_name dataset_path json_path path_or_dataset path_or_dataset_id train_file "
            "train_files"
        ),
        "subset of a source in data.sources": "dataset_config",
        "data.tokenize_workers": "dataset_num_proc dataset_processes preprocessing_num_workers",
        "data.shuffle": "dataset_shuffle shuffle_dataset shuffle_merged_datasets train_dataloader_shuffle",
        "data.columns, e.g. {text: NAME}": "dataset_text_field",
        "split of a source in data.sources": "dataset_train_split",
        "data.val_path": "dataset_val eval_dataset val_dataset val_files validation_dataset validation_file",
        "data.sources": "datasets",
        "nothing: trainer.accelerator says it": "ddp_backend",
        "nothing": "ddp_find_unused_parameters model_class torch_empty_cache_steps",
        "timeout of the class lightning.pytorch.strategies.DDPStrategy": "ddp_timeout",
        "trainer.strategy lit_ft.strategies.DeepSpeedStrategy, your file as its config (docs/migration.md)": (
            "deepspeed"
        ),
        "run_dir": (
            "default_local_dir default_root_dir dump_folder experiment_name log_dir logging_dir out_dir output_dir "
            "run_name swanlab_exp_name swanlab_run_name wandb_name wandb_run_name"
        ),
        "data.system": "default_system default_system_message new_system_prompt system_message system_prompt",
        "nothing: lit_ft.PolicyLM clips nothing (of EarlyStopping: min_delta)": "delta",
        "model.objective.desirable_weight of lit_ft.KTO": "desirable_weight kto_chosen_weight kto_desirable_weight",
        "nothing: trainer.devices and trainer.strategy say it": "device_map",
        "model.peft.r": "dim lora_r lora_rank rank",
        "model.peft.lora_dropout (0)": "disable_dropout",
        "trainer.enable_progress_bar": "disable_tqdm",
        "data.val_path or data.val_fraction: fit validates where it has the data": "do_eval",
        "nothing: the command predict answers": "do_predict",
        "nothing: the command fit trains": "do_train",
        "nothing: name a file or a hub data set with data.path": "download_dir",
        "model.objective.beta": "dpo_beta pref_beta rl_beta",
        "model.objective.label_smoothing": "dpo_label_smoothing",
        "model.objective, e.g. lit_ft.DPO; see recipes/preference": "dpo_loss_type pref_loss",
        "model.objective.nll_weight (of sigmoid and sft)": "dpo_loss_weights loss_weights",
        "nothing: batches have no padding": (
            "dpo_padding_free group_by_length ignore_pad_token_for_loss pad_to_multiple_of pad_to_sequence_len "
            "pad_token padding_free padding_side use_remove_padding"
        ),
        "nothing: logits of unsupervised tokens are never computed": (
            "dpo_use_liger_kernel dpo_use_logits_to_keep liger_fused_linear_cross_entropy use_liger_loss "
            "use_logits_to_keep"
        ),
        "nothing: trainer.strategy says where weights are gathered": "ds3_gather_for_generation",
        "nothing: prompts whose answers all have one reward train nothing": (
            "dynamic_sample max_resample_times replay_buffer_size"
        ),
        "a callback, lightning.pytorch.callbacks.EarlyStopping": (
            "early_stop_interval early_stopping_patience early_stopping_steps"
        ),
        "model.lr_factors, e.g. {embed_tokens: 0.1}": "embedding_learning_rate embedding_lr embedding_lr_scale",
        "nothing: each source in data.sources has its own loss": "enable_channel_loss",
        "model.token_weights (lit_ft.DFT)": "enable_dft_loss use_dft_loss",
        "model.liger": (
            "enable_liger_kernel liger_glu_activation liger_layer_norm liger_rms_norm liger_rope use_liger "
            "use_liger_kernel"
        ),
        "nothing: there is no term of the entropy": "entropy_coef log_entropy",
        "nothing: answers end as the chat template writes it": "eos_token eot_tokens stop_words",
        "trainer.max_epochs": "epochs n_epochs num_epochs num_train_epochs total_epochs",
        "nothing: lit_ft.PolicyLM clips nothing (of an optimizer: eps)": "epsilon",
        "nothing: lit_ft.PolicyLM clips nothing": "epsilon_high",
        "data.packing": (
            "eval_packing eval_sample_packing neat_packing packed_sequence_size packing packing_length sample_packing"
        ),
        "trainer.val_check_interval in micro-batches: times trainer.accumulate_grad_batches": (
            "eval_steps run_val_every_n_steps test_freq val_every_steps"
        ),
        "trainer.val_check_interval": "eval_strategy evaluation_strategy",
        "a callback, lit_callbacks.SampleGenerations": "eval_table_size",
        "trainer.val_check_interval (below 1: a fraction of an epoch)": "evals_per_epoch",
        "data.overlong": "excess_length_strategy truncation_mode truncation_strategy",
        "expert_parallel_size of the class lit_ft.strategies.ModelParallelStrategy": "expert_parallel_degree",
        "nothing: the command export merges on the CPU": "export_device",
        "out of the command export": "export_dir",
        "nothing: weights are written as safetensors": "export_legacy_format save_safetensors",
        "nothing: weights are written in parts where they are large": "export_size",
        "nothing: name the class of your own reward in model.rewards": "external_plugins",
        "model.peft: peft.LoraConfig, or null for full fine-tuning": "finetuning_type",
        "nothing: attention over packed batches is chosen by the device": (
            "flash_attention flash_attn sdp_attention use_flash_attention use_flash_attn xformers_attention"
        ),
        "trainer.precision (16-mixed)": "float16 fp16",
        "nothing: the reference is the model as the run begins (docs/preferences.md)": (
            "force_use_ref_model ref_adapter_name ref_adapters ref_model ref_model_adapters ref_model_quantization_bit "
            "rl_adapter_ref_model"
        ),
        "model.trainable": (
            "freeze_extra_modules freeze_parameters_ratio freeze_trainable_layers freeze_trainable_modules "
            "trainable_parameters unfrozen_parameters"
        ),
        "model.trainable (what is left)": "freeze_parameters",
        "trainer.strategy; see recipes/strategies/fsdp_offload.yaml": "fsdp_cpu_offload",
        "model.peft: null": "full_finetuning",
        "nothing: each answer is used for one optimizer step": (
            "generation_batch_size num_iterations steps_per_generation"
        ),
        "nothing: answers are drawn from all tokens": "generation_kwargs min_p repetition_penalty top_k top_p",
        "nothing: divergences are over the whole vocabulary": (
            "gkd_logits_topk kd_normalize_topk kd_online_topk loss_add_tail loss_top_k reverse_kl_top_1_mode"
        ),
        "data.micro_batch_size times trainer.accumulate_grad_batches times devices": "global_batch_size",
        "trainer.devices": "gpus n_gpus_per_node num_gpus",
        "trainer.accumulate_grad_batches": "gradient_accumulation_steps",
        "nothing: see model.gradient_checkpointing": "gradient_checkpointing_kwargs",
        "mode of the callback lightning.pytorch.callbacks.ModelCheckpoint": "greater_is_better",
        "nothing: upload what export writes, with hf upload": "hub_model_id push_to_hub",
        "resume_data: changed": "ignore_data_skip",
        "nothing: each answer is used for one optimizer step, without a ratio": "importance_sampling_level",
        "nothing: every run logs its throughput": "include_num_input_tokens_seen include_tokens_per_second",
        "nothing: the command serve prints that of vLLM": "infer_backend",
        "model.peft.init_lora_weights": "init_weights peft_init_lora_weights",
        "weight of each source in data.sources": "interleave_prob interleave_probs",
        "nothing: config.json says the model's class": "is_llama_derived_model teacher_model_type",
        "model.kd_ratio of lit_ft.DistillationLM (kd_alpha / (kd_alpha + kd_ce_alpha))": "kd_alpha kd_ce_alpha",
        "model.divergence of lit_ft.DistillationLM (0: lit_ft.ForwardKL, 1: lit_ft.ReverseKL)": "kd_beta",
        "model.divergence of lit_ft.DistillationLM, e.g. lit_ft.ForwardKL": "kd_loss kd_loss_fn",
        "nothing: the teacher runs beside the student": (
            "kd_online_server kd_online_server_base_url kd_online_timeout teacher_model_server "
            "teacher_model_server_url use_teacher_server"
        ),
        "model.divergence.temperature of lit_ft.DistillationLM": "kd_temperature",
        "nothing: the temperature of a divergence stays as it is": "kd_temperature_min",
        "lit_ft.DistillationLM as model.class_path": "kd_trainer",
        "nothing: a KL penalty is a part of the loss (model.kl_weight of lit_ft.PolicyLM)": "kl_in_reward",
        "model.objective.undesirable_weight of lit_ft.KTO": (
            "kto_rejected_weight kto_undesirable_weight undesirable_weight"
        ),
        "nothing: the loss is the cross-entropy (another one: docs/python.md)": "label_smoothing_factor",
        "nothing: tokens are kept in data.cache_dir, or streamed (data.streaming)": "lazy_tokenize",
        "optimizer.lr": "learning_rate lr",
        "nothing: each token counts by its own divergence alone": "length_normalization rkl_advantage",
        "max_rows of a source in data.sources": "limit_dataset_samples max_samples num_samples_limit",
        "model.on_policy of lit_ft.OnPolicyDistillationLM (0: lit_ft.DistillationLM)": "lmbda",
        "--ckpt_path best for export and predict": "load_best_model_at_end",
        "nothing: tokens in the cache are of the same data and options": "load_from_cache_file overwrite_cache",
        "model.quantization; see recipes/tuning/qlora_int8.yaml": "load_in_8bit",
        "data.micro_batch_size": (
            "local_batch_size micro_batch_size micro_batch_size_per_gpu per_device_train_batch_size train_batch_size"
        ),
        "nothing: the launcher tells each process its rank": "local_rank",
        "nothing: sampled_answers.jsonl of the run folder has answers with their rewards": (
            "log_completions log_completions_steps num_completions_to_print"
        ),
        "trainer.log_every_n_steps": "log_freq log_interval logging_first_step logging_steps",
        "a callback, lit_callbacks.MemoryProfiler": "log_peak_memory_stats",
        "trainer.logger; see recipes/loggers": (
            "logger_name metric_logger project_name report_to wandb_entity wandb_log_model wandb_watch"
        ),
        "nothing: probabilities come from the teacher itself (model.teacher)": "logprobs_field",
        "model.peft.bias": "lora_bias",
        "model.peft.lora_dropout": "lora_dropout",
        "model.peft.fan_in_fan_out": "lora_fan_in_fan_out",
        "model.fused_lora": "lora_mlp_kernel lora_o_kernel lora_qkv_kernel",
        "model.peft.target_modules (all-linear)": "lora_target_linear match_all_linear",
        "model.peft.target_parameters": "lora_target_parameters",
        "model.lr_factors, e.g. {lora_B: 16}": "lorap_lr_ratio loraplus_lr_ratio",
        "model.lr_factors, e.g. {lora_embedding: 0.01}": "loraplus_lr_embedding",
        "data.supervise (last_round: last)": "loss_scale",
        "model.objective (lit_ft.DPO), or model.algorithm (lit_ft.DrGRPO); dft: model.token_weights": "loss_type",
        "a callback, lit_callbacks.SpikeGuard": "loss_watchdog_patience loss_watchdog_threshold",
        "lr_scheduler, e.g. lit_ft.schedules.CosineWithWarmup": "lr_decay_style lr_scheduler_type",
        "model.lr_factors, e.g. {o_proj: 0.1}": "lr_groups",
        "lr_scheduler.warmup (1 or more: optimizer steps)": "lr_warmup_steps num_warmup_steps warmup_steps",
        "lr_scheduler.warmup (below 1: a fraction of the run)": "lr_warmup_steps_ratio warmup_ratio",
        "data.supervise: last": "mask_history",
        "model.train_on_cut_answers of lit_ft.PolicyLM (false)": "mask_truncated_completions overlong_filter",
        "model.max_new_tokens": "max_completion_length",
        "trainer.limit_val_batches": "max_iters",
        "data.max_length (of a prompt with its answer)": "max_prompt_len max_prompt_length",
        "trainer.max_steps": "max_steps steps total_training_steps",
        "trainer.limit_train_batches in micro-batches: times trainer.accumulate_grad_batches": "max_steps_per_epoch",
        "merge": "merge_lora save_consolidated",
        "data.columns: {conversations: NAME} where turns have from and value": "message_property_mappings",
        "monitor of the callback lightning.pytorch.callbacks.ModelCheckpoint": "metric_for_best_model",
        "data.mixing": "mix_strategy stopping_strategy",
        "trainer.precision": "mixed_precision",
        "trainer.logger; see recipes/loggers/mlflow.yaml": "mlflow_experiment_name mlflow_tracking_uri use_mlflow",
        "nothing: fill the placeholders of the data (docs/data.md)": "model_author",
        "nothing: rewards are summed, then compared": "multi_objective_aggregation",
        "nothing: each prompt has one answer of one turn": "multi_turn_scheduler",
        "model.neftune_alpha": "neftune_noise_alpha noisy_embedding_alpha",
        "trainer.num_nodes": "nnodes",
        "nothing: answers are compared with others to the same prompt only": "normalize_advantages",
        "model.answers_per_prompt of lit_ft.PolicyLM": "num_generations",
        "nothing: validation takes one greedy answer to each prompt": "num_generations_eval",
        "nothing: lit_ft.RewardLM has one score": "num_labels",
        "nothing: the teacher stays in memory (model.teacher_quantization makes it smaller)": "offload_teacher_model",
        "optimizer, e.g. torch.optim.AdamW": "optim",
        "model.objective.beta of lit_ft.ORPO": "orpo_alpha",
        "nothing: no run folder is overwritten": "overwrite_output_dir",
        "data.packing: a number of tokens": "packed",
        "nothing: packing is by best fit": "packing_strategy sample_packing_eff_est",
        "model.peft.layers_to_transform": "peft_layers_to_transform",
        "model.peft.use_dora": "peft_use_dora use_dora",
        "model.peft.use_rslora": "peft_use_rslora use_rslora",
        "trainer.strategy; see recipes/strategies/pipeline_parallel.yaml": (
            "pipeline_parallel_degree pipeline_parallel_schedule"
        ),
        "model.peft.init_lora_weights (pissa)": "pissa_init",
        "nothing: every run writes report.html": "plot_loss",
        "nothing: they are computed before the first step": "precompute_ref_log_probs",
        "the callback lit_ft.AnswerScores (ROUGE, BLEU), or the commands predict and evaluate": "predict_with_generate",
        "model.objective.nll_weight": "pref_ftx rpo_alpha",
        "data.path, with data.streaming": "pretraining_dataset",
        "nothing: there are no rewards of steps; lit_ft.RewardLM scores whole answers": "process_reward_model",
        "data.columns, e.g. {instruction: NAME}": "prompt_key",
        "ckpt_path": "recipe_checkpoint resume_from_checkpoint",
        "nothing: no reference is updated (docs/preferences.md)": (
            "ref_model_mixup_alpha ref_model_sync_steps sync_ref_model"
        ),
        "nothing: lit_ft.SimPO and lit_ft.ORPO need no reference": "reference_free",
        "nothing: columns that nothing reads are named": "remove_unused_columns",
        "nothing: embeddings grow where added tokens need it": "resize_token_embeddings_to_32x resize_vocab",
        "data.columns, e.g. {output: NAME}": "response_key",
        "nothing: download it (hf download --revision), and name its folder with model.pretrained": "revision",
        "nothing: merge it, for pretrained of lit_ft.RewardModel (model.rewards)": (
            "reward_adapters reward_model_adapters"
        ),
        "nothing: rewards are not clipped": "reward_clip_range",
        "model.rewards of lit_ft.PolicyLM, e.g. lit_ft.ExactAnswer": "reward_funcs",
        "pretrained of lit_ft.RewardModel in model.rewards of lit_ft.PolicyLM; true: lit_ft.RewardLM": "reward_model",
        "pretrained of lit_ft.RewardModel in model.rewards of lit_ft.PolicyLM": "reward_model_name_or_path",
        "nothing: a class of your own in model.rewards": "reward_model_plugin",
        "nothing: lit_ft.RewardModel (model.rewards) is not quantized": "reward_model_quantization_bit",
        "nothing: lit_ft.RewardModel (model.rewards) reads its config": "reward_model_type",
        "nothing: lit_ft.RewardModel (model.rewards) reads the tokenizer of its folder": "reward_processing_classes",
        "nothing: lit_ft.RewardModel (model.rewards) reads the chat template of its folder": "reward_template",
        "model.reward_weights of lit_ft.PolicyLM": "reward_weights",
        "nothing: supervised training, or a recipe of preference, policy or distillation (recipes)": "rl rlhf_type",
        "data.supervise; or train: true in a message": "roles_to_train",
        "model.config_overrides, e.g. {rope_parameters: {rope_type: yarn, factor: 4.0}}": "rope_scaling",
        "nothing: the adapter is written beside the checkpoints": "save_adapter_weights_only",
        "save_weights_only of the callback lightning.pytorch.callbacks.ModelCheckpoint": "save_only_model",
        "save_top_k of the callback lightning.pytorch.callbacks.ModelCheckpoint with monitor: step": "save_total_limit",
        "model.algorithm.scale_rewards of lit_ft.GRPO": "scale_rewards",
        "nothing: the teacher is on the ranks that train (model.shard_teacher lets them share it)": "separate_meshes",
        "nothing: predict writes answers of the teacher, for model.class_path lit_ft.DistillationLM": "seq_kd",
        "model.kd_ratio of lit_ft.DistillationLM (1 / (1 + sft_alpha))": "sft_alpha",
        "gamma of the class lit_ft.SimPO (model.objective)": "simpo_gamma",
        "model.divergence of lit_ft.DistillationLM (lit_ft.ReverseKL)": "single_step_decomposition",
        "nothing: answers that train nothing are left out": "skip_zero_advantage_batches",
        "free_tokens of the class lit_ft.OverlongPenalty (max_tokens less soft_cache_length)": "soft_cache_length",
        "max_tokens of the class lit_ft.OverlongPenalty (model.rewards)": "soft_max_length",
        "nothing: batches have no padding, and answers end as the chat template writes it": "special_tokens",
        "data.val_fraction": "split_dataset_ratio test_size val_set_size val_size val_split_fraction val_split_ratio",
        "nothing: supervised training, or recipes/preference for dpo, ipo, kto, orpo, simpo and rm (reward_model)": (
            "stage"
        ),
        "nothing: unknown options are refused": "strict",
        "trainer.logger; see recipes/loggers/swanlab.yaml": "swanlab_mode swanlab_project use_swanlab",
        "nothing: export merges an adapter; name the merged folder with model.teacher": "teacher_adapters",
        "model.teacher of lit_ft.DistillationLM": "teacher_checkpointer teacher_model teacher_model_name_or_path",
        "model.shard_teacher (true shares its layers)": "teacher_deepspeed teacher_distributed",
        "nothing: the divergence is the loss, not a part of a reward": "teacher_kl_coef",
        "model.teacher_dtype of lit_ft.DistillationLM, or model.teacher_quantization": "teacher_model_init_kwargs",
        "nothing: download it (hf download --revision), and name its folder with model.teacher": (
            "teacher_model_revision"
        ),
        "nothing: there is one teacher": "teacher_tag_key",
        "nothing: the teacher has the student's tokenizer": (
            "teacher_tokenizer_name_or_path uld_crossentropy_weight uld_distillation_weight uld_hybrid_matched_weight "
            "uld_hybrid_unmatched_weight uld_skip_student_eos uld_skip_teacher_eos uld_student_temperature "
            "uld_teacher_temperature uld_token_merge_strategy uld_use_hybrid_loss use_extended_uld use_uld_loss"
        ),
        "nothing: answers are drawn at temperature 1 (of a divergence: model.divergence.temperature)": "temperature",
        "nothing: the model's own chat template is taken, or that of data.chat_template": "template template_backend",
        "trainer.strategy; see recipes/strategies/tensor_parallel.yaml": "tensor_parallel_degree tp_size",
        "data.val_sources": "test_datasets",
        "nothing: trainer.precision and model.dtype say what is computed in": "tf32 upcast_layernorm",
        "nothing: tokens are cached": "tokenized_path",
        "model.tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_path",
        "nothing: the tokenizer says its class": "tokenizer_type",
        "model.added_tokens": "tokens",
        "nothing: all tokens of an answer train": "top_entropy_quantile",
        "model.compile": "torch_compile",
        "model.dtype": "torch_dtype",
        "nothing: batches are planned from the tokens themselves": "total_num_tokens",
        "nothing: the end of a supervised turn is supervised": "train_on_eos train_on_eot",
        "data.supervise: all": "train_on_input train_on_inputs train_on_prompt",
        "nothing: no code of a model is run": "trust_remote_code",
        "data.format (completion, for raw text)": "use_chat_template",
        "trainer.accelerator (cpu)": "use_cpu",
        "optimizer; see recipes/optimizers/galore.yaml": "use_galore",
        "nothing: model.pretrained is a folder or a hub id": "use_hf",
        "nothing: every run logs to TensorBoard": "use_tensorboard",
        "nothing: see model.fused_lora": "use_triton use_unsloth",
        "model.gradient_checkpointing, with model.activation_offload": "use_unsloth_gc",
        "trainer.logger; see recipes/loggers/wandb.yaml": "use_wandb wandb_project",
        "nothing: a resumed run goes on in its run": "wandb_run_id",
        "lr_scheduler.warmup": "warmup",
        "optimizer.weight_decay": "weight_decay",
    }.items()
    for theirs in words.split()
}
"""Names of options in transformers, TRL, Unsloth, LLaMA-Factory, Axolotl, ms-swift, torchtune, LitGPT, verl, NeMo and
torchtitan."""

_OURS = {"lit_ft": lit_ft.__all__, "lit_ft.strategies": strategies.__all__}

CLASSES = {name.lower(): f"{home}.{name}" for home, names in _OURS.items() for name in names} | {
    theirs: ours
    for ours, words in {
        "transformers.BitsAndBytesConfig; see recipes/tuning/qlora_nf4.yaml": "4bit bnb nf4",
        "transformers.BitsAndBytesConfig; see recipes/tuning/qlora_int8.yaml": "8bit int8",
        "lit_ft.FinalNumber or lit_ft.ExactAnswer": "accuracy accuracy_reward",
        "torch.optim.Adafactor": "adafactor",
        "torch.optim.Adam": "adam",
        "torch.optim.AdamW": "adamw adamw_hf adamw_torch",
        "bitsandbytes.optim.AdamW8bit": "adamw_8bit adamw_bnb_8bit",
        "torch.optim.AdamW with fused: true": "adamw_torch_fused",
        "lightning.pytorch.loggers.CometLogger; see recipes/loggers/comet.yaml": "comet",
        "nothing: without lr_scheduler the learning rate is constant": "constant",
        "lit_ft.schedules.ConstantWithWarmup": "constant_with_warmup",
        "lit_ft.schedules.CosineWithWarmup": "cosine cosine_with_warmup cosinewithwarmup",
        "lit_ft.schedules.CosineWithWarmup with final_fraction": "cosine_with_min_lr",
        "nothing: every run writes metrics.csv": "csv csvlogger",
        "peft.LoraConfig with use_dora: true": "dora",
        "lit_ft.DrGRPO": "dr_grpo",
        "lightning.pytorch.callbacks.EarlyStopping": "early_stopping earlystopping",
        "lit_ft.Matches": "format think_format_reward",
        "lit_ft.ForwardKL": "forward_kl forwardklloss forwardklwithchunkedoutputloss kdloss",
        "lit_ft.galore.GaLoreAdamW": "galore",
        "lit_ft.OverlongPenalty": "get_soft_overlong_punishment soft_overlong",
        "peft.IA3Config": "ia3",
        "lit_ft.JensenShannon": "jsd",
        "lit_ft.schedules.LinearWithWarmup": "linear",
        "bitsandbytes.optim.Lion": "lion",
        "peft.LoraConfig": "lora",
        "lightning.pytorch.loggers.MLFlowLogger; see recipes/loggers/mlflow.yaml": "mlflow",
        "lit_ft.optimizers.SplitOptimizer; see recipes/optimizers/muon.yaml": "muon",
        "bitsandbytes.optim.PagedAdamW": "paged_adamw_32bit",
        "bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit",
        "peft.LoraConfig; see recipes/tuning/qlora_nf4.yaml": "qlora",
        "lit_ft.ReverseKL": "reverse_kl reverseklloss reverseklwithchunkedoutputloss",
        "lit_ft.RewardLM": "rewardtrainer",
        "torch.optim.SGD": "sgd",
        "lit_ft.DPO": "sigmoid",
        "the class that recipes/loggers/swanlab.yaml names": "swanlab",
        "nothing: every run logs to TensorBoard": "tensorboard",
        "lightning.pytorch.loggers.WandbLogger; see recipes/loggers/wandb.yaml": "wandb",
        "lit_ft.schedules.CosineWithWarmup with stable": "warmup_stable_decay",
        "lit_ft.schedules.LinearWithWarmup with stable": "wsd",
    }.items()
    for theirs in words.split()
}
"""Short names of optimizers, schedules, tuning methods, quantizations, loggers, objectives, algorithms, divergences and
rewards."""

EXAMPLES = {
    "lr_scheduler": ("lit_ft.schedules.CosineWithWarmup", ("lit_ft.schedules", "torch.optim.lr_scheduler")),
    "model.algorithm": ("lit_ft.GRPO", ("lit_ft",)),
    "algorithm": ("lit_ft.GRPO", ("lit_ft",)),
    "model.divergence": ("lit_ft.ForwardKL", ("lit_ft",)),
    "divergence": ("lit_ft.ForwardKL", ("lit_ft",)),
    "model.objective": ("lit_ft.DPO", ("lit_ft",)),
    "objective": ("lit_ft.DPO", ("lit_ft",)),
    "model.rewards": ("lit_ft.ExactAnswer", ("lit_ft",)),
    "rewards": ("lit_ft.ExactAnswer", ("lit_ft",)),
    "model.token_weights": ("lit_ft.DFT", ("lit_ft",)),
    "token_weights": ("lit_ft.DFT", ("lit_ft",)),
    "model.peft": ("peft.LoraConfig", ("peft",)),
    "peft": ("peft.LoraConfig", ("peft",)),
    "model.quantization": ("transformers.BitsAndBytesConfig", ("transformers",)),
    "quantization": ("transformers.BitsAndBytesConfig", ("transformers",)),
    "optimizer": ("torch.optim.AdamW", ("torch.optim",)),
    "trainer.callbacks": (
        "lightning.pytorch.callbacks.EarlyStopping",
        ("lit_callbacks", "lightning.pytorch.callbacks"),
    ),
    "trainer.logger": ("lightning.pytorch.loggers.WandbLogger", ("lightning.pytorch.loggers",)),
    "trainer.strategy": ("lit_ft.strategies.FSDPStrategy", ("lit_ft.strategies", "lightning.pytorch.strategies")),
}
"""By option: a class that it takes, and the modules of others."""
