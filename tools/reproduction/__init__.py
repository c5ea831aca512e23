"""The paper's tables and figures: what they print, and how to make them again."""
