/* Access for keyboards and screen readers where Material's own scripts leave none. */
(() => {
  // A row of buttons in each listing is no navigation landmark.
  const plain = (root) => root.querySelectorAll?.("nav.md-code__nav").forEach((nav) => nav.setAttribute("role", "none"));
  new MutationObserver((changes) => changes.forEach((change) => plain(change.target))).observe(document.body, {
    childList: true,
    subtree: true,
  });
  plain(document);

  // Drawer and search open by labels, which take no focus; a button beside each does.
  for (const [toggle, name] of [["__drawer", "打开导航"], ["__search", "打开搜索"]]) {
    const label = document.querySelector(`label.md-header__button[for=${toggle}]`);
    const button = document.createElement("button");
    button.type = "button";
    button.className = "hf-press";
    button.setAttribute("aria-label", name);
    button.onclick = () => document.getElementById(toggle).click();
    label?.append(button);
  }
})();
