"""The style sheet of the page, in light and dark."""

STYLE = """
:root{--paper:#f6f7f9;--card:#fff;--ink:#1b2130;--soft:#5d6678;--line:#e3e6ec;--grid:#eceff4;--main:#2f66b0;--raw:#a9c3e6;
--second:#d9861f;--good:#1f7a4d;--good-bg:#e2f4ea;--warn:#8a5a00;--warn-bg:#fdf0d5;--bad:#b3261e;--bad-bg:#fce8e6;
--live:#2f66b0;--live-bg:#e5eefb;--shade:rgba(179,38,30,.12)}
@media(prefers-color-scheme:dark){:root{--paper:#12151b;--card:#1a1f28;--ink:#e7eaf0;--soft:#98a2b5;--line:#2b323e;
--grid:#252c37;--main:#7fb0f2;--raw:#3f5f8c;--second:#f0a94a;--good:#7fd6a5;--good-bg:#173527;--warn:#f2c46d;
--warn-bg:#3a2d12;--bad:#ff9a91;--bad-bg:#41201d;--live:#9cc4fa;--live-bg:#1b2f4a;--shade:rgba(255,154,145,.16)}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif}
main{max-width:1220px;margin:0 auto;padding:36px 24px 24px}
h1{font-size:28px;line-height:1.2;margin:0;overflow-wrap:anywhere;letter-spacing:-.01em}
h2{font-size:16px;margin:0 0 10px}
h2 small{font-weight:400;color:var(--soft);font-size:13px;margin-left:6px}
.sub{color:var(--soft);margin:4px 0 14px}
.verdict{margin:0;overflow-wrap:anywhere}
.badge{display:inline-block;padding:2px 12px;border-radius:99px;font-weight:600;margin-right:6px}
.good{color:var(--good);background:var(--good-bg)}.warn{color:var(--warn);background:var(--warn-bg)}
.bad{color:var(--bad);background:var(--bad-bg)}.live{color:var(--live);background:var(--live-bg)}
.remark{color:var(--warn);margin:6px 0 0;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:14px;margin:22px 0 16px}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:12px}
.tile{padding:14px 16px;display:flex;flex-direction:column}
.tile span,.tile small{color:var(--soft);font-size:13px}
.tile b{font-size:24px;line-height:1.3;font-variant-numeric:tabular-nums}
.card{padding:18px 20px;min-width:0;margin:0 0 16px}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:0 16px;align-items:start}
svg{display:block;width:100%;height:auto}
.tick{font-size:11.5px;fill:var(--soft);font-variant-numeric:tabular-nums}
.halo{paint-order:stroke;stroke:var(--card);stroke-width:4px;fill:var(--ink)}
path.grid{stroke:var(--grid);fill:none}
.axis{stroke:var(--line);fill:none}
.line{fill:none;stroke-linejoin:round;stroke-linecap:round}
.line.main{stroke:var(--main);stroke-width:1.8}
.line.soft{stroke:var(--raw);stroke-width:1}
circle.main,circle.soft{fill:var(--main)}
circle.dots{fill:var(--second);stroke:var(--card);stroke-width:1}
.level{stroke:var(--second);stroke-dasharray:4 4;fill:none}
path.resume{stroke:var(--soft);stroke-dasharray:2 3;fill:none}
path.skip{fill:var(--bad)}path.spike{fill:none;stroke:var(--bad)}
rect.rollback{fill:var(--shade)}
.track{fill:var(--grid)}.bar{fill:var(--main)}.expected{stroke:var(--second);stroke-width:2}
.legend{display:flex;flex-wrap:wrap;gap:4px 20px;margin:8px 0 0;color:var(--soft);font-size:13px}
.key::before{content:"";display:inline-block;width:18px;height:3px;border-radius:2px;margin-right:7px;vertical-align:middle}
.key.main::before{background:var(--main)}.key.soft::before{background:var(--raw)}
.key.dots::before{width:8px;height:8px;border-radius:50%;background:var(--second)}
.key.resume::before{height:0;border-top:2px dotted var(--soft)}
.key.skip::before{width:0;height:0;border:5px solid transparent;border-bottom:0;border-top:8px solid var(--bad);
border-radius:0}
.key.spike::before{width:0;height:8px;border-left:2px solid var(--bad);border-radius:0}
.key.rollback::before{height:12px;background:var(--shade)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{text-align:left;color:var(--soft);font-weight:500}
th,td{padding:5px 12px 5px 0;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:anywhere}
tr:last-child td{border-bottom:0}
td:first-child{color:var(--soft);overflow-wrap:normal}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--paper);border-radius:8px;padding:10px 12px;
margin:12px 0 0;font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:0 40px}
.pair svg{max-width:700px}
.paper svg{width:auto;max-width:100%;margin:0 auto}
.paper{background:#fff;border-radius:8px;padding:8px;overflow-x:auto}
.none{color:var(--soft);margin:0}
footer{color:var(--soft);font-size:13px;padding:8px 0}
@media print{body{background:#fff}.card,.tile{break-inside:avoid}}
"""
