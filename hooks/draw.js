/* In the browser of hooks/draw.py: renders a Mermaid source and returns the SVG as it goes into a page.
 *
 * What Mermaid writes for use by scripts and for other diagrams goes: rules that match nothing, markers and ids that
 * nothing refers to, data-*, decimals. A drawing so shrinks to a tenth, and two on a page never clash.
 */
async ([id, source]) => {
  document.body.innerHTML = (await mermaid.render(id, source)).svg;
  const svg = document.body.querySelector("svg");

  for (const style of svg.querySelectorAll("style")) {
    const rules = [...style.sheet.cssRules].filter((rule) => rule.selectorText && document.querySelector(rule.selectorText));
    style.textContent = rules.map((rule) => rule.cssText).join("\n");
  }
  for (const element of svg.querySelectorAll("[id]")) {
    const references = [`url(#${element.id})`, `url("#${element.id}")`, `url(&quot;#${element.id}&quot;)`, `href="#${element.id}"`];
    const named = ["aria-labelledby", "aria-describedby"].some((name) => svg.getAttribute(name) === element.id);
    if (named || references.some((text) => svg.outerHTML.includes(text))) continue;
    if (element.matches("marker, symbol, filter, linearGradient")) element.remove();
    else element.removeAttribute("id");
  }
  for (const row of svg.querySelectorAll("tspan.row")) {
    const inner = [...row.children];
    if (inner.every((part) => part.getAttribute("font-weight") === "normal" && part.getAttribute("font-style") === "normal")) row.textContent = row.textContent;
  }
  for (const rect of svg.querySelectorAll("rect:not([width])")) rect.remove();
  for (let empty; (empty = svg.querySelectorAll(":is(g, defs):empty")).length; ) empty.forEach((element) => element.remove());
  for (const element of [svg, ...svg.querySelectorAll("*")])
    for (const { name, value } of [...element.attributes]) {
      if (name.startsWith("data-") || (name === "style" && !/\w/.test(value))) element.removeAttribute(name);
      else if (!["id", "class"].includes(name)) element.setAttribute(name, value.replace(/-?\d+\.\d{2,}/g, (number) => `${+(+number).toFixed(1)}`));
    }

  const { width, height } = svg.viewBox.baseVal;
  svg.setAttribute("role", "img");
  svg.removeAttribute("aria-roledescription");
  svg.setAttribute("width", Math.ceil(width));
  svg.setAttribute("height", Math.ceil(height));
  svg.setAttribute("style", `--width: ${Math.ceil(width)}px`); // site.css sizes it by this
  const text = new XMLSerializer().serializeToString(svg);
  return text.replace(/><(?!\/?(tspan|text>))/g, ">\n<"); // readable in a diff; a space between tspans would be drawn
}
