/* The filter of reproduce.md. The page is whole without it; this only hides what does not match,
 * keeps the choice in the address (?find=…&status=fails,stale), and says how much is shown. */
document$.subscribe(() => {
  const form = document.querySelector("form.hf-find");
  if (!form || !form.hidden) return;
  const words = { 成立: "holds", 不成立: "fails", 未测: "unmeasured" };
  const rows = (region) => [...(region?.querySelectorAll("tbody tr") ?? [])].map((row) => ({ row, text: row.textContent.toLowerCase() }));

  const experiments = [...document.querySelectorAll(".hf-exp")].map((heading) => {
    const parts = [heading];
    for (let next = heading.nextElementSibling; next && !/^H[12]$/.test(next.tagName); next = next.nextElementSibling) parts.push(next);
    return { id: heading.id, parts, states: heading.dataset.status.split(" "), text: parts.map((e) => e.textContent).join(" ").toLowerCase() };
  });
  const overview = rows(form.nextElementSibling);
  const claims = rows(document.getElementById("claims")?.nextElementSibling);
  for (const claim of claims) {
    claim.states = [...claim.row.querySelectorAll(".hf-badge")].map((badge) => words[badge.lastChild.textContent.trim()]);
    if (claim.text.includes("（过期）")) claim.states.push("stale");
  }

  function apply() {
    const wanted = form.elements.find.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const states = [...form.querySelectorAll("[name=status]:checked")].map((box) => box.value);
    const matches = (item) => wanted.every((word) => item.text.includes(word)) && (!states.length || states.some((s) => item.states.includes(s)));
    const shown = new Set(experiments.filter(matches));
    for (const item of experiments) for (const part of item.parts) part.hidden = !shown.has(item);
    const ids = new Set([...shown].map((item) => item.id));
    for (const { row } of overview) row.hidden = !ids.has(row.querySelector("a")?.hash.slice(1));
    for (const claim of claims) claim.row.hidden = !matches(claim);
    const found = claims.filter((claim) => !claim.row.hidden).length;
    form.querySelector("output").textContent = `显示 ${shown.size} / ${experiments.length} 个实验，${found} / ${claims.length} 条论断`;
    const url = new URL(location.href);
    url.searchParams.delete("find");
    url.searchParams.delete("status");
    if (wanted.length) url.searchParams.set("find", wanted.join(" "));
    if (states.length) url.searchParams.set("status", states.join(","));
    if (url.href !== location.href) history.replaceState(history.state, "", url);
  }

  /* A link to something that the filter hides ends the filter: an anchor must be reachable. */
  function reveal() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target?.closest("[hidden]")) return;
    form.reset();
    setTimeout(() => target.scrollIntoView());
  }

  const query = new URLSearchParams(location.search);
  form.elements.find.value = query.get("find") ?? "";
  for (const box of form.querySelectorAll("[name=status]")) box.checked = (query.get("status") ?? "").split(",").includes(box.value);
  form.hidden = false;
  form.addEventListener("input", apply);
  form.addEventListener("reset", () => setTimeout(apply)); // the event comes before the fields change
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", reveal);
  apply();
  reveal();
});
