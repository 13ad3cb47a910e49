"""The draft under the names SGLang finds models by; `ModelRegistry.register` reads this package."""
