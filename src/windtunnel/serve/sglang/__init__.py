"""The live SGLang server, unified and disaggregated."""
