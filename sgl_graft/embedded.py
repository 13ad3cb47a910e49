"""The embedded model's name, apart from `models`: commands start without what that imports."""

EMBEDDED_MODEL = "smollm2-135m-instruct"
