"""Losses of a language-model head computed tile by tile, so that whole logits never exist."""
