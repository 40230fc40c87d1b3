"""A judge's weights in 4 bits, fitted to what a judge reads, in a folder that vLLM serves."""
