"""What a run tells: metrics, events, progress, the W&B mirror, and the page's template."""
