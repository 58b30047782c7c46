"""Around the tokenizer: vocabulary formats, streaming detokenization and its filters, token bytes, fill-in-the-middle."""
