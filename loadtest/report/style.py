"""The page's one style sheet: light or dark by the reader's setting, and printable."""

STYLE = """
:root {
  color-scheme: light dark;
  --bg: #ffffff; --card: #f7f8fa; --ink: #1c2330; --dim: #5c6675; --rule: #d9dee6; --grid: #e8ebf0;
  --good: #1a7f4b; --warn: #9a5b00; --bad: #b3261e; --limit: #b3261e;
  --s0: #2f6bd8; --s1: #d9730d; --s2: #2e9e6b; --s3: #8e5bd0;
  --s4: #c9a400; --s5: #d1435b; --s6: #1799ab; --s7: #7d8794;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #12161d; --card: #1a2029; --ink: #e6eaf0; --dim: #9aa5b4; --rule: #303a48; --grid: #262e3a;
    --good: #5bc98f; --warn: #e2a44a; --bad: #f2857d; --limit: #f2857d;
    --s0: #6fa1ff; --s1: #f29a4a; --s2: #58c795; --s3: #b48cf0;
    --s4: #e3c64a; --s5: #f0788c; --s6: #4cc3d4; --s7: #9aa5b4;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; font-weight: 650; }
h2 { font-size: 17px; margin: 34px 0 12px; font-weight: 650; }
h3 { font-size: 14px; margin: 0 0 4px; font-weight: 600; }
p { margin: 0 0 8px; }
.dim { color: var(--dim); }
.subtitle { color: var(--dim); margin-bottom: 18px; overflow-wrap: anywhere; }
.banner {
  border-left: 4px solid; padding: 8px 14px; margin: 0 0 12px; background: var(--card);
  border-radius: 0 6px 6px 0;
}
.banner.bad { border-color: var(--bad); } .banner.bad b { color: var(--bad); }
.banner.warn { border-color: var(--warn); } .banner.warn b { color: var(--warn); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin: 18px 0 8px; }
.tile { background: var(--card); border-radius: 8px; padding: 12px 14px; }
.tile .name { color: var(--dim); font-size: 13px; }
.tile .value { font-size: 24px; font-weight: 650; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile .value small { font-size: 14px; font-weight: 500; color: var(--dim); }
.tile .note { color: var(--dim); font-size: 13px; }
.tile.good .value { color: var(--good); } .tile.bad .value { color: var(--bad); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 18px; }
figure { margin: 0; background: var(--card); border-radius: 8px; padding: 12px 14px 6px; }
figure p { font-size: 13px; color: var(--dim); margin: 0 0 4px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td {
  padding: 5px 14px 5px 0; text-align: right; border-bottom: 1px solid var(--rule);
  white-space: nowrap; vertical-align: top;
}
th { color: var(--dim); font-weight: 500; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td.wrap { white-space: normal; overflow-wrap: anywhere; text-align: left; min-width: 260px; }
td.best { font-weight: 650; color: var(--good); }
tr.miss td { color: var(--dim); }
a { color: var(--s0); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 0; font-size: 14px; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
details { margin-top: 26px; } summary { cursor: pointer; color: var(--dim); }
details > *:not(summary) { margin-top: 10px; }
svg {
  display: block; width: 100%; height: auto;
  font: 12px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
svg text { fill: var(--ink); } svg .tick, svg .axis-title { fill: var(--dim); }
svg .legend { font-size: 11.5px; }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--rule); }
svg .limit { stroke: var(--limit); stroke-dasharray: 5 4; stroke-width: 1.3; }
svg .limit-text {
  fill: var(--limit); font-size: 11.5px;
  paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round;
}
svg .line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
svg .line.faint { stroke: var(--dim); stroke-dasharray: 3 4; stroke-width: 1.1; opacity: .7; }
svg .hollow { fill: var(--card); stroke: var(--c); stroke-width: 1.6; }
svg .area { fill: var(--c); opacity: .18; }
svg .bar, svg .dot { fill: var(--c); }
svg .mark { fill: var(--c); opacity: .65; }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); } .s3 { --c: var(--s3); }
.s4 { --c: var(--s4); } .s5 { --c: var(--s5); } .s6 { --c: var(--s6); } .s7 { --c: var(--s7); }
@media print { body { font-size: 12px; } figure, .tile { break-inside: avoid; } }
"""
