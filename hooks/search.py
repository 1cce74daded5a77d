"""MkDocs hook: refuse to build a site whose Chinese search would be broken.

Material segments Chinese with jieba when it can be imported and silently
indexes whole sentences when it cannot, so that 关卡 or 梯度检查点 find nothing.
"""

from importlib.util import find_spec

from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority


@event_priority(100)  # before the search plugin reads its user dictionary
def on_config(config):
    if find_spec("jieba") is None:
        raise PluginError(
            "jieba is not installed, so Chinese search would find nothing. "
            "Remedy: python -m pip install -r requirements-site.txt"
        )
    return config
