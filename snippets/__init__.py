"""The code of the articles: every module here runs by itself with ``python -m snippets.<group>.<name>``."""
