"""Where bytes, formats and kernels meet: models, caches, the engine, and all that surrounds an answer. `docs/ARCHITECTURE.md` has a map."""
