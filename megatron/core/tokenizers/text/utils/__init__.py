"""build_tokenizer(args) under the path of Megatron Core."""
