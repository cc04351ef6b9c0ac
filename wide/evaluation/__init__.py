"""Measuring a routed model: perplexity beside dense, the routing report, text samples."""
