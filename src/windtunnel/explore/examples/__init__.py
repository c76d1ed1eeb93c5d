"""Models of public bug reports, each before and after its fix: to copy from. `docs/explore.md` walks through one."""
