"""Results as one self-contained HTML page with plots: inline SVG, no script, nothing loaded from elsewhere."""
