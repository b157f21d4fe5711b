//! The page that shows all figures.

use super::figure::Figure;
use crate::report::page::STYLE;
use crate::report::svg::Escaped;
use std::fmt::Write;

pub(super) fn page(figures: &[Figure]) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <link rel=\"icon\" href=\"data:,\">\n<title>The papers' figures, simulated</title>\n\
         <style>\n{STYLE}figure img {{ display: block; max-width: 100%; height: auto; border-radius: 6px; }}\n\
         </style>\n</head>\n<body>\n<main>\n<header>\n<p class=\"eyebrow\">poseidon figures</p>\n\
         <h1>The papers' figures, simulated</h1>\n<p class=\"lead\">{LEAD}</p>\n</header>\n"
    );
    for figure in figures {
        let _ = write!(
            page,
            "<figure id=\"{id}\">\n<h3>{title}</h3>\n<p class=\"about\">{about}</p>\n\
             <img src=\"{id}.svg\" alt=\"{title}\">\n\
             <p class=\"about\"><a href=\"{id}.csv\">{id}.csv</a></p>\n</figure>\n",
            id = figure.id,
            title = Escaped(figure.title),
            about = Escaped(figure.about),
        );
    }
    let _ = write!(
        page,
        "</main>\n<footer>\n<p>poseidon {}</p>\n</footer>\n</body>\n</html>\n",
        env!("CARGO_PKG_VERSION")
    );
    page
}

const LEAD: &str = "Lines are what the simulator says, with the code that ships and the network and devices \
    of the papers; diamonds are what the papers' texts say; squares were measured with real processes. Why \
    they differ where they do is in docs/reproduction.md, and so is which figures are left out, and why.";
