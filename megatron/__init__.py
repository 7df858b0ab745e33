"""A training framework for GPT and mixture-of-experts models under the names that Megatron-LM users know."""
