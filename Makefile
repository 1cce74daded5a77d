# Commands of this site. `make` alone lists them.
#
# Everything is installed into .venv and remembered by a stamp: a second call
# starts at once, a changed requirements file installs again. On a machine that
# already has the packages (a GPU runner's image, say), PY=python3 uses that
# interpreter as it is and installs nothing.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

PYTHON ?= python3
ADDRESS ?= 127.0.0.1:8000
# Two workers; the tests of one file stay together, so that they share a built site.
PYTEST_ARGS ?= -n 2 --dist loadfile

ifdef PY
stamp =
else
PY := .venv/bin/python
stamp = .venv/.installed-$(1)
endif

# Material prints a notice about MkDocs 2 on every start; this site pins MkDocs 1.
export NO_MKDOCS_2_WARNING := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Builds strictly beside the published folder and swaps at the end: a failed or
# interrupted build leaves the old site as it was.
define build
new=$$(mktemp -d .site-new.XXXXXX)
trap 'if [ ! -e site ] && [ -e "$$new/old" ]; then mv "$$new/old" site; fi; rm -rf "$$new"' EXIT
$(PY) -m mkdocs build --strict --site-dir "$$new/site"
if [ -e site ]; then mv site "$$new/old"; fi
mv "$$new/site" site
echo "站点已生成：site/index.html"
endef

.PHONY: help serve site test check compare refresh diagrams screenshots chromium clean

help: ## 列出全部命令
	@grep -hE '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

serve: $(call stamp,site) ## 本地预览（只装轻量包，不装 torch），改动即时刷新
	@exec $(PY) -m mkdocs serve --dev-addr $(ADDRESS)

site: $(call stamp,site) ## 用已有记录严格构建到 site/；失败时保留旧站点
	@$(build)

test: $(call stamp,test) chromium node_modules/.installed ## 安装测试所需并运行全部测试
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest $(PYTEST_ARGS)

check: $(call stamp,site) ## 列出过期、缺失和冒烟的记录与没画的图；known.yml 没写理由的，返回非零
	@$(PY) -m hooks.check

compare: $(call stamp,site) ## 比较两组记录：A=提交、设备或 提交:设备，B 同（默认工作区）
	@if [ -z "$(A)" ]; then echo "用法：make compare A=main [B=提交、设备或 提交:设备]" >&2; exit 2; fi
	$(PY) -m hooks.compare "$(A)" $(if $(B),"$(B)")

# REFRESH: a list of experiment ids or globs, "stale", or "all".
refresh: export REFRESH := $(or $(ONLY),$(if $(STALE),stale,all))
refresh: export SMOKE := $(SMOKE)
refresh: $(call stamp,full) ## 重新测量并构建：ONLY=编号,通配 或 STALE=1；SMOKE=1 用小参数
	@$(if $(and $(ONLY),$(STALE)),echo "ONLY 与 STALE 只能给一个" >&2; exit 2)
	$(build)

diagrams: $(call stamp,test) chromium ## 把新的和改过的图画成 SVG，存入 diagrams/；删去不再用的
	@$(PY) -m hooks.draw

screenshots: $(call stamp,test) chromium site ## 截取各页：桌面与手机、浅色与深色，存入 screenshots/
	@$(PY) -m tests.site.screenshots

chromium:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do
	  if command -v "$$name" >/dev/null; then exit 0; fi
	done
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	  echo "安装 Chromium 与中文字体…"
	  apt-get update -qq
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-noto-cjk >/dev/null
	else
	  echo "没有找到 Chromium。请安装 Chromium 或 Chrome（Debian：sudo apt-get install chromium fonts-noto-cjk）后重试。" >&2
	  exit 1
	fi

# The auditors of the built pages (axe, html-validate, vnu, Lighthouse); the site itself needs no Node.
node_modules/.installed: package.json package-lock.json
	@missing=
	command -v npm >/dev/null || missing="nodejs npm"
	command -v java >/dev/null || missing="$$missing default-jre-headless"
	if [ -n "$$missing" ]; then
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	    echo "安装 $$missing…"
	    apt-get update -qq
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null
	  else
	    echo "检查页面还需要 Node.js 18.19 以上（含 npm）和 Java 17 以上。请安装（Debian：sudo apt-get install $$missing）后重试。" >&2
	    exit 1
	  fi
	fi
	echo "安装页面检查工具（package.json）…"
	npm ci --loglevel=error
	touch $@

clean: ## 删除 site/、缓存与安装的包
	@rm -rf site .site-new.* .cache .venv node_modules screenshots

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "需要 Python 3.11 或更新；用 make PYTHON=python3.12 … 指定" >&2; exit 1; }
	$(PYTHON) -m venv .venv || { echo "无法创建虚拟环境（Debian：apt-get install python3-venv）" >&2; rm -rf .venv; exit 1; }

.venv/.installed-site: requirements-site.txt | .venv/bin/python
	@echo "安装站点所需的包（$<）…"
	.venv/bin/python -m pip install -q -r $<
	touch $@

.venv/.installed-full: requirements.txt requirements-site.txt | .venv/bin/python
	@echo "安装测量所需的包（$<，含 torch）…"
	.venv/bin/python -m pip install -q -r $<
	touch $@ .venv/.installed-site

.venv/.installed-test: requirements-test.txt requirements.txt requirements-site.txt | .venv/bin/python
	@echo "安装测试所需的包（$<，含 torch）…"
	.venv/bin/python -m pip install -q -r $<
	touch $@ .venv/.installed-full .venv/.installed-site
