"""Base language models: a quickstart, and published models for compilation and simulation."""
