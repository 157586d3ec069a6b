"""The shape of tiny-hybrid and the mixture it is trained on: every number the recipe's steps share."""

VOCABULARY = 8192
MAX_POSITIONS = 32768
END_OF_TEXT = 0  # <|endoftext|>, written between documents

TRUNK = {
    "vocab_size": VOCABULARY,
    "hidden_size": 320,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "rope_parameters": {  # text positions only, so without the sections that Qwen's vision models add
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
    },
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
}

# How often a training token is drawn from each group of sources, relative to the group's size
GROUP_WEIGHTS = {
    "scripture": 2.0,
    "commentary": 1.0,
    "lexicon": 3.0,
    "wordnet": 1.0,
    "sqlite": 3.0,
    "manual": 1.0,
    "code": 0.5,
    "chat": 1.0,
}
