//! A running job is watched: by `query live`, by `top` in a real pseudo-terminal, as a page in a real
//! browser, and by a real Prometheus. Where a program that the test needs is not installed, the test
//! says so and passes.

use crate::trial::SMALL;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const POSEIDON: &str = env!("CARGO_BIN_EXE_poseidon");
const PATIENCE: Duration = Duration::from_secs(120);

/// A job of `poseidon train` that goes on until it is dropped, and its page.
struct Job {
    folder: TempDir,
    train: Child,
    /// Where the page is.
    page: String,
}

impl Job {
    /// Three workers, which pretend to compute for a while in each step, the last one four times as long.
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("small.toml"), SMALL).unwrap();
        let errors = std::fs::File::create(folder.path().join("stderr")).unwrap();
        let mut train = Command::new(POSEIDON);
        let flags = "train --model small.toml --workers 3 --batch 4 --epochs 100000 --compute 100ms \
                     --slow 2:4 --report report --dashboard :0";
        train.args(flags.split_whitespace());
        train.env_clear().env("HOME", folder.path()).env("POSEIDON_METRICS", "127.0.0.1:0");
        train.current_dir(&folder);
        train.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        let mut train = train.spawn().unwrap();
        let errors = || std::fs::read_to_string(folder.path().join("stderr")).unwrap();
        let mut page = None;
        wait_for("the page's address", || {
            if let Some(status) = train.try_wait().unwrap() {
                panic!("{status}: {}", errors());
            }
            let errors = errors();
            let after = errors.split("the job is shown at http://").nth(1);
            page = after.and_then(|rest| Some(rest.split_once('/')?.0.to_owned()));
            page.is_some()
        });
        Self { page: page.unwrap(), folder, train }
    }

    /// What the page's server answers, with the head.
    fn get(&self, path: &str, host: &str) -> String {
        let mut stream = TcpStream::connect(&self.page).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Waits until every worker has told that it makes steps.
    fn wait_for_steps(&self) {
        wait_for("every worker makes steps", || {
            let answer = self.get("/live", &self.page);
            let json = answer.split_once("\r\n\r\n").unwrap().1;
            let live: Value = serde_json::from_str(json).unwrap();
            let nodes = live["job"]["nodes"].as_array().cloned().unwrap_or_default();
            let steps = |node: &Value| node["steps_per_second"].as_f64().unwrap() > 0.0;
            nodes.len() == 3 && nodes.iter().all(steps)
        });
    }

    /// Runs the command as somebody who is in no job, in the home of the one who has started this one.
    fn poseidon(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(POSEIDON);
        command.args(arguments).env_clear().env("HOME", self.folder.path()).env("COLUMNS", "100");
        command.stdin(Stdio::null()).output().unwrap()
    }

    /// Where the nodes serve their own metrics.
    fn metrics(&self) -> Vec<String> {
        let mut found = Vec::new();
        wait_for("every worker serves metrics", || {
            let errors = std::fs::read_to_string(self.folder.path().join("stderr")).unwrap();
            let after = errors.split(" serves metrics at http://").skip(1);
            found = after.filter_map(|rest| Some(rest.split_once('/')?.0.to_owned())).collect();
            found.len() == 3
        });
        found
    }

    /// The coordinator's address, as a worker knows it.
    fn coordinator(&self) -> String {
        let children = format!("/proc/{0}/task/{0}/children", self.train.id());
        let mut found = None;
        wait_for("a worker with a coordinator", || {
            let pids = std::fs::read_to_string(&children).unwrap();
            found = pids.split_whitespace().find_map(|pid| {
                let variables = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
                let variables = String::from_utf8_lossy(&variables).into_owned();
                let of = |v: &str| v.strip_prefix("POSEIDON_COORDINATOR=").map(String::from);
                variables.split('\0').find_map(of)
            });
            found.is_some()
        });
        found.unwrap()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // The workers end with what has started them.
        let _ = self.train.kill();
        let _ = self.train.wait();
    }
}

fn wait_for(what: &str, mut happens: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !happens() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A program of the system. Without it, the test says that it shows nothing.
fn installed(program: &str) -> Option<PathBuf> {
    let found = ["/usr/bin", "/usr/local/bin"].map(|folder| Path::new(folder).join(program));
    let found = found.into_iter().find(|path| path.exists());
    if found.is_none() {
        eprintln!("skipped: {program} is not installed");
    }
    found
}

#[test]
fn a_job_is_found_and_shown_in_a_terminal_as_json_and_to_prometheus() {
    let job = Job::start();
    job.wait_for_steps();
    // Other tests may run jobs of the same user, so the address is said; the secret is not.
    let coordinator = job.coordinator();
    let ask = |arguments: &[&str]| {
        let output = job.poseidon(&[arguments, &["--coordinator", &coordinator]].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let live: Value = serde_json::from_str(&ask(&["query", "live"])).unwrap();
    assert_eq!(live["missing"], serde_json::json!([]));
    assert!(live["steps"].as_u64().unwrap() > 0, "{live}");
    assert_eq!(live["plan"]["epoch"], 1);
    // What they send stays on this host.
    assert!(live["sent_inside"].as_f64().unwrap() > 0.0, "{live}");
    let names: Vec<_> = live["nodes"].as_array().unwrap().iter().map(|n| &n["name"]).collect();
    assert_eq!(names, ["worker 0", "worker 1", "worker 2"]);

    // The others wait for the one that computes longer, and nobody has told them so.
    wait_for("worker 2 is the slowest", || {
        let slowest: Value = serde_json::from_str(&ask(&["query", "live.slowest"])).unwrap();
        slowest["node"] == 2
    });

    let frame = ask(&["top"]);
    for part in ["3 nodes, running for", "steps/s", "worker 2", "the job has begun, with 3 nodes"] {
        assert!(frame.contains(part), "{part}:\n{frame}");
    }
    assert!(!frame.contains('\x1b'), "{frame:?}");

    let metrics = job.get("/metrics", &job.page);
    assert!(metrics.starts_with("HTTP/1.1 200"), "{metrics}");
    assert!(metrics.contains("poseidon_node_up{node=\"worker 1\""), "{metrics}");
    // A page of somebody else that calls itself by another name learns nothing.
    let stranger = job.get("/live", "evil.example");
    assert!(stranger.starts_with("HTTP/1.1 421"), "{stranger}");
    assert!(job.get("/elsewhere", &job.page).starts_with("HTTP/1.1 404"));
}

#[test]
fn a_browser_shows_the_job_and_says_so_when_there_is_no_news() {
    let Some(chromium) = installed("chromium") else { return };
    let mut job = Job::start();
    job.wait_for_steps();
    let dom = |url: &str, home: &Path| {
        let out = home.join("dom.html");
        let mut browser = Command::new(&chromium);
        browser.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]);
        // The page goes on hearing news, so the browser is told when it has seen enough.
        browser.args(["--timeout=2000", "--dump-dom", url]);
        browser.env("HOME", home).stdin(Stdio::null()).stderr(Stdio::null());
        browser.stdout(std::fs::File::create(&out).unwrap());
        let mut browser = Ended(browser.spawn().unwrap());
        let mut status = None;
        wait_for("the browser has seen the page", || {
            status = browser.0.try_wait().unwrap();
            status.is_some()
        });
        let dom = std::fs::read_to_string(out).unwrap();
        assert!(status.unwrap().success(), "{status:?}: {dom}");
        dom
    };
    let page = dom(&format!("http://{}/", job.page), job.folder.path());
    for part in ["<td>worker 2", "3 nodes, running for", "the job has begun, with 3 nodes"] {
        assert!(page.contains(part), "{part}:\n{page}");
    }
    let rows = page.split("id=\"plan\"").nth(1).unwrap().split("</tbody>").next().unwrap();
    assert!(rows.contains("fc1") && rows.contains("sfb"), "{rows}");
    assert!(!page.contains("<body class=\"old\">"), "{page}");

    // A dashboard of its own outlives the job.
    let coordinator = job.coordinator();
    let mut dashboard = Command::new(POSEIDON);
    dashboard.args(["dashboard", ":0", "--patience", "30", "--coordinator", &coordinator]);
    let errors = job.folder.path().join("dashboard");
    dashboard.env_clear().env("HOME", job.folder.path()).stdin(Stdio::null());
    dashboard.stderr(std::fs::File::create(&errors).unwrap());
    let _dashboard = Ended(dashboard.spawn().unwrap());
    let mut address = None;
    wait_for("the second page's address", || {
        let text = std::fs::read_to_string(&errors).unwrap();
        let after = text.split("the job is shown at ").nth(1);
        address = after.and_then(|rest| Some(rest.split_once('\n')?.0.to_owned()));
        address.is_some()
    });
    let address = address.unwrap();
    job.page = address.trim_start_matches("http://").trim_end_matches('/').into();
    job.wait_for_steps();
    let _ = job.train.kill();
    let _ = job.train.wait();
    wait_for("the page notices", || job.get("/metrics", &job.page).starts_with("HTTP/1.1 503"));
    let page = dom(&address, job.folder.path());
    assert!(page.contains("<body class=\"old\">") && page.contains("No news since "), "{page}");
    // What was heard last is still there.
    assert!(page.contains("<td>worker 2"), "{page}");
}

/// `poseidon top` in a pseudo-terminal, which `script` of util-linux makes.
struct Screen {
    script: Ended,
    keys: ChildStdin,
    /// What a terminal makes of all that was written to it.
    shown: Arc<Mutex<vt100::Parser>>,
    folder: PathBuf,
}

impl Screen {
    const ROWS: u16 = 30;
    const COLUMNS: u16 = 100;

    fn start(script: &Path, job: &Job) -> Self {
        let folder = job.folder.path().to_owned();
        // The terminal's settings are noted before and after.
        let commands = format!(
            "tty > tty; stty rows {} cols {}; stty -g > before; {POSEIDON} top --coordinator {}; \
             echo $? > status; stty -g > after",
            Self::ROWS,
            Self::COLUMNS,
            job.coordinator()
        );
        let mut script = Command::new(script);
        script.args(["--quiet", "--flush", "--command", &commands, "/dev/null"]);
        script.env_clear().env("HOME", &folder).env("TERM", "xterm").env("PATH", "/usr/bin:/bin");
        script.current_dir(&folder).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut script = script.spawn().unwrap();
        let (keys, mut output) = (script.stdin.take().unwrap(), script.stdout.take().unwrap());
        let shown = Arc::new(Mutex::new(blank(Self::ROWS, Self::COLUMNS)));
        let screen = shown.clone();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                screen.lock().unwrap().process(&bytes[..count]);
            }
        });
        Self { script: Ended(script), keys, shown, folder }
    }

    fn text(&self) -> String {
        self.shown.lock().unwrap().screen().contents()
    }

    /// Whether the table has a row of this worker.
    fn has_row(&self, worker: u16) -> bool {
        let begins = format!("│worker {worker} ");
        self.text().lines().any(|line| line.starts_with(&begins))
    }

    fn wait_for(&self, what: &str, happens: impl Fn(&Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !happens(self) {
            assert!(Instant::now() < end, "never: {what}:\n{}", self.text());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn press(&mut self, keys: &[u8]) {
        self.keys.write_all(keys).unwrap();
        self.keys.flush().unwrap();
    }

    /// Somebody makes the terminal's window another size.
    fn resize(&self, rows: u16, columns: u16) {
        let tty = std::fs::read_to_string(self.folder.join("tty")).unwrap();
        // What is drawn from now on is for the new size; what was there is gone.
        *self.shown.lock().unwrap() = blank(rows, columns);
        let (rows, columns) = (rows.to_string(), columns.to_string());
        let stty =
            Command::new("stty").args(["-F", tty.trim(), "rows", &rows, "cols", &columns]).status();
        assert!(stty.unwrap().success());
    }

    /// Waits until it has ended, with the terminal as it was.
    fn ends_well(mut self) {
        wait_for("top ends", || self.script.0.try_wait().unwrap().is_some());
        let read = |name: &str| std::fs::read_to_string(self.folder.join(name)).unwrap();
        assert_eq!(read("status").trim(), "0");
        assert_eq!(read("before"), read("after"));
        self.wait_for("the cursor is back, and the first screen", |screen| {
            let shown = screen.shown.lock().unwrap();
            !shown.screen().alternate_screen() && !shown.screen().hide_cursor()
        });
    }
}

/// A terminal on which nothing was written.
fn blank(rows: u16, columns: u16) -> vt100::Parser {
    let size = |number| std::num::NonZero::new(number).unwrap();
    vt100::Parser::new(size(rows), size(columns), 0)
}

#[test]
fn top_answers_to_keys_and_to_its_terminal_and_leaves_it_as_it_was() {
    let Some(script) = installed("script") else { return };
    let job = Job::start();
    job.wait_for_steps();
    let mut screen = Screen::start(&script, &job);
    screen.wait_for("all workers are shown", |screen| (0..3).all(|worker| screen.has_row(worker)));
    assert!(screen.shown.lock().unwrap().screen().alternate_screen());
    screen.press(b"j");
    screen.wait_for("worker 0 is scrolled away", |s| !s.has_row(0) && s.has_row(1));
    // The arrow, as a terminal writes it.
    screen.press(b"\x1b[A");
    screen.wait_for("worker 0 is back", |screen| screen.has_row(0));
    // Keys that mean nothing change nothing.
    screen.press(b"xyz");
    screen.resize(40, 70);
    screen.wait_for("all is drawn again for the new size", |screen| {
        let text = screen.text();
        let borders = text.lines().filter(|line| line.starts_with('┌') && line.ends_with('┐'));
        screen.has_row(2) && borders.map(|line| line.chars().count()).any(|width| width == 70)
    });
    screen.press(b"q");
    screen.ends_well();

    // Ctrl-C is a key there, and no signal.
    let mut screen = Screen::start(&script, &job);
    screen.wait_for("a worker is shown", |screen| screen.has_row(0));
    screen.press(b"\x03");
    screen.ends_well();
}

#[test]
fn prometheus_scrapes_the_whole_job_and_each_node() {
    let Some(prometheus) = installed("prometheus") else { return };
    let job = Job::start();
    let at = |name: &str| job.folder.path().join(name);
    let config = format!(
        "global:\n  scrape_interval: 1s\nscrape_configs:\n  - job_name: p\n    static_configs:\n      \
         - targets: ['{}', '{}']\n",
        job.page,
        job.metrics().join("', '")
    );
    std::fs::write(at("prometheus.yml"), config).unwrap();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let server = Command::new(prometheus)
        .arg(format!("--config.file={}", at("prometheus.yml").display()))
        .arg(format!("--storage.tsdb.path={}", at("data").display()))
        .arg(format!("--web.listen-address={free}"))
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(at("prometheus.log")).unwrap())
        .spawn()
        .unwrap();
    let _server = Ended(server);
    let ask = |query: &str| -> Option<Value> {
        let mut stream = TcpStream::connect(free).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        let request = format!("GET /api/v1/query?query={query} HTTP/1.0\r\nHost: {free}\r\n\r\n");
        stream.write_all(request.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
    };
    wait_for("Prometheus knows three nodes that make steps", || {
        let Some(answer) = ask("poseidon_node_steps_total%3E0") else { return false };
        answer["data"]["result"].as_array().is_some_and(|nodes| nodes.len() == 3)
    });
    wait_for("Prometheus knows what each node says of itself", || {
        let counts = ["poseidon_steps_total", "poseidon_lane_busy_seconds_total"].map(|metric| {
            let answer = ask(&format!("count(count%20by%20(instance)({metric}%3E0))"));
            let count =
                |answer: Value| answer["data"]["result"][0]["value"][1].as_str().map(String::from);
            answer.and_then(count)
        });
        counts.iter().all(|count| count.as_deref() == Some("3"))
    });
}

/// A process that is ended with the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
