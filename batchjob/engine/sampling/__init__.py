"""From logits to tokens: settings by slot, filters, draws."""
