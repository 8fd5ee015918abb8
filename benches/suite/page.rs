//! `docs/benchmarks.md` and its plots, written from the figures of a run of all sections.

use std::fmt::Write;
use std::fs;

use super::Outcome;
use super::markdown::{bold, or_dash, paragraph, wrap};
use super::page_pairs::{self, pairs_of};
use super::peers::{CLIENTS, Peers, Subject, TASKS, TurnsRow, subjects};
use super::plot::{self, Bar, Series, thousands};
use super::report::Report;
use super::server::repository;
use super::server_cpu::Kind;
use super::{beside_rslock, reads, turns};

const INTRO: &str = "\
Every figure is from one run, with servers and clients on the same machine. redlatch and the other \
libraries are measured in turn, in several rounds; figures are medians of the rounds. Ratios of pairs \
are medians of the ratios of each round, other ratios are those of the medians. *Many holders, waiters \
and readers* was measured once.

Absolute numbers depend on the machine; the ratios of one run depend on it much less. Each section \
measures anew, on servers of its own and with its own placement on cores, so the same quantity differs \
from section to section. `scripts/bench` writes this page, so edits of it are lost.";

const TURNS: &str = "\
All clients contend for one lock name and hold it for no time. Each client has its own connections; \
all are in one process. A turn is an acquisition by another client than the one before: a client \
that acquires the lock twice in a row has one turn.

*Fewest/most* compares the clients with the fewest and the most turns. A library that polls uses the delay in brackets, in milliseconds.";

const POLLS: &str = "The delay is the one of 1, 2, 5 and 20 ms with the most turns.";
const POLLS_OF_QUICK_RUN: &str = "In this quick run, the delay is fixed for each number of clients.";

const COMPARABLE: &str = "\
The libraries promise different things, so a rate alone does not choose one:

- **Fencing.** redlatch returns a token that grows with each grant, also in the rows for its read, \
write and re-entrant locks. None of the other locks that are measured here does.
- **Renewal.** A renewed lease needs a background task for each held lock or for all of them. \
Without it, a lock ends at its TTL while its holder still works.
- **Waiting.** A library that polls sends requests all the time while it waits. The rates count \
only acquisitions; the delays that suit a benchmark would load a server with many waiters.
- **Languages.** The rates include the runtime: one event loop in Node and Python, several threads \
in Rust, Go and Java. Compare libraries of one language, or their server time.
- **One server.** Libraries that implement Redlock run with one server here, as redlatch does.
- **Clients of one process.** Real clients are on other machines. A round trip then takes longer, \
and a library that needs fewer of them gains more than this page shows.";

const SHARD: &str = "\
A server, or a shard of a cluster, runs all scripts on one core. Its CPU time for a pair limits how \
many pairs it can serve.

The columns *computed* divide one second by the measured server time with 256 tasks, and 70 % of it: \
closer to full load, requests wait for each other. They assume a core for the server alone, clients \
on other machines, and as many requests at once as here: with few, the server time is higher.";

const TOPOLOGIES: &str = "\
The mutex, on three servers and with all clients on the same machine. On the quorum, both libraries \
send each request to all three nodes.

On the cluster, names are spread over three masters. *Server* and *client* are microseconds of CPU time for one pair, the servers all together.";

const INSIDE: &str = "\
Tasks pass a lock on, and share a hold to read, without a request: [waiting](waiting.md). *Without* is \
`Options::local_turn` of zero, in turn on the same server.";

const SCALE: &str = "\
One redlatch client, or a few, on one server, or on a cluster where it says so. The memory of a \
client is that of its process, with what its allocator keeps. The round trips of a new client are \
counted by a proxy that delays each message; a bare round trip is a script that does nothing.

Commands count the calls inside scripts, and what the holder sends: its renewals, and a `PING` \
twice a second. On a quorum, readers that wait cost more: [waiting](waiting.md).

For a killed holder stands a lease \
of 300 ms that is never renewed nor released. 10,000 locks with a TTL of 3 s are renewed as often as \
100,000 with 30 s.";

/// What was tried on the rows that miss their limit, and what limits them.
const MISSED: &str = "\
Two cores for servers and clients limit many of these rows.

- **Pairs with many tasks.** With a core for the server, it is busy nearly always from 64 tasks on; \
with 1,024 tasks and a mutex so is the client's core. On shared cores, the second thread of a client \
displaces the server.
- **Work of the server.** A lock is one write with a TTL and one counter, and its release one more \
write. The re-entrant lock and the sides of the read-write lock are hashes, which take two commands to \
write; with one field fewer in them, scripts took 8 % less. rlock's sides have no token.
- **One task.** A pair is two round trips, in which the server spends 12 us more than for two small \
scripts: each call names the words of its verb, keeps the errors of its locks apart and answers a \
list, for one lock as for 128. With the server and the client on one core, all of it adds up.
- **Turns.** A hand-over is two requests and 15 commands inside the scripts, one of which publishes \
the message to the next holder. A third of the server's time for it are the scripts, the rest is \
reading and writing on three sockets, which no script can spare. Between two clients, a turn takes \
little longer than a round trip.
- **Quorum.** Each request goes to three nodes. They agree on a token and look for a queue: eight \
commands a pair on each, where rslock's take three.
- **Cluster.** A script takes keys of one slot, so requests for names in different slots cannot share \
a call, which halves the time on one server. They travel together to each master, which made a third \
more pairs than one by one. Three servers read from and write to three times as many connections.
- **Inside a client.** A round of less than a second varies by more than the two hundredths that the \
limit leaves. In twelve pairs of rounds of a second, the median of tasks with names of their own was \
0.98 and 1.07 in two runs, of one task 0.98, and of 2, 16 and 256 clients 1.00 to 1.01. A writer \
beside readers that need no request waits until they leave it a core.
- **One name beside rslock.** With one process and its best delay, rslock takes as many turns as one \
task alone: one of its tasks has the lock again and again, while the others pause. A hundred times as \
many are a turn in 1 us. On two threads, waking the next task takes longer than that.
- **Waiting tasks.** One task of a client waits in Redis for the others and polls every two seconds; a \
poll is 7 or 8 commands inside its script. Longer pauses would leave less time for a late poll before \
the waiter counts as dead. Tasks that read with an owner each wait in Redis, and one of them \
polls for all.
- **Held locks.** The limit holds for the server and for the client, each by itself. 100,000 locks are \
10,000 renewals a second, in calls for up to 128 locks.
- **Processes.** Each hand-over wakes another process, and two cores serve all of them and the server.
- **Memory.** A lock is two keys with a TTL each, which costs the server more than their contents. With \
Debian's build of Redis 7.0.15, whose allocator rounds to 16 bytes, a lock takes 312 bytes; the same \
keys take 280 on Redis 6.2.14 and 184 on Valkey 9.1.2.

";

pub(crate) fn write(report: &Report, is_quick: bool) -> Outcome<()> {
    let Some(peers) = &report.peers else { return Ok(()) };
    let docs = repository()?.join("docs");
    let plots = docs.join("benchmarks");
    fs::create_dir_all(&plots)?;
    fs::write(plots.join("pairs.svg"), pairs_plot(peers))?;
    fs::write(plots.join("turns.svg"), turns_plot(peers))?;
    fs::write(plots.join("inside.svg"), beside_rslock::plot(&report.topologies.beside_rslock))?;
    fs::write(plots.join("server.svg"), server_plot(peers))?;
    fs::write(docs.join("benchmarks.md"), page(report, peers, is_quick)?)?;
    println!("written to docs/benchmarks.md, docs/benchmarks/*.svg");
    Ok(())
}

fn page(report: &Report, peers: &Peers, is_quick: bool) -> Outcome<String> {
    let mut page = String::from("# Benchmarks\n\n");
    paragraph(&mut page, INTRO)?;
    let head = &report.head;
    writeln!(page, "| | |\n|---|---|")?;
    writeln!(page, "| command | `{}` |", head.command)?;
    writeln!(page, "| server | {}, without persistence |", head.server)?;
    writeln!(page, "| machine | {} cores ({}), for server and clients |", head.cores, head.processor)?;
    writeln!(page, "| rounds | {} |\n", if is_quick { "1: a first look" } else { "3; of one task 5" })?;
    writeln!(page, "## Locks without waiters\n\n![Pairs a second by tasks](benchmarks/pairs.svg)\n")?;
    page_pairs::write(&mut page, peers)?;
    writeln!(page, "## One lock, many clients\n\n![Turns a second by clients](benchmarks/turns.svg)\n")?;
    paragraph(&mut page, &format!("{TURNS} {}", if is_quick { POLLS_OF_QUICK_RUN } else { POLLS }))?;
    turns_table(&mut page, peers)?;
    let plot = "![Turns a second by processes](benchmarks/inside.svg)";
    writeln!(page, "## Inside a client\n\n{plot}\n")?;
    paragraph(&mut page, INSIDE)?;
    turns::table(&report.turns, &mut page)?;
    reads::table(&report.reads, &mut page)?;
    topologies(&mut page, report)?;
    writeln!(page, "## Many holders, waiters and readers\n")?;
    paragraph(&mut page, SCALE)?;
    writeln!(page, "| | measured | |\n|---|---:|---|")?;
    for row in &report.scale {
        writeln!(page, "| {} | {:.2} | {} |", row.what, row.measured, row.unit)?;
    }
    writeln!(page, "\n## What is not comparable\n")?;
    for part in COMPARABLE.split('\n') {
        wrap(&mut page, part)?;
    }
    writeln!(
        page,
        "\n| library | client | fencing | renewal | waiting | settings |\n|---|---|---|---|---|---|"
    )?;
    for (language, library) in &peers.libraries {
        let name = if library.version.is_empty() { "SET NX PX, bare" } else { &library.name };
        let (version, client) = (&library.version, &library.client);
        let (fencing, renewal, waiting) = (&library.fencing, &library.renewal, &library.waiting);
        let settings = &library.settings;
        writeln!(
            page,
            "| {name} {version} | {language}, {client} | {fencing} | {renewal} | {waiting} | {settings} |"
        )?;
    }
    if !peers.notices.is_empty() {
        writeln!(page, "\nNotices of the run:\n")?;
        for notice in &peers.notices {
            writeln!(page, "- {}", notice.split("; see ").next().unwrap_or_default())?;
        }
    }
    writeln!(page, "\n## What one shard carries\n\n![Server time a pair](benchmarks/server.svg)\n")?;
    shard(&mut page, report)?;
    targets(&mut page, report)?;
    writeln!(page, "\n### What limits the missed ones\n")?;
    for part in MISSED.trim_end().split('\n') {
        wrap(&mut page, part)?;
    }
    page += "\n## Repeat it\n\n```sh\nscripts/bench            # overwrites this page: less than 15 minutes\n\
             scripts/bench --quick    # the same from one round: less than 4 minutes\n\
             scripts/bench peers      # only the comparison, to the terminal and target/bench.json\n```\n\n";
    paragraph(
        &mut page,
        "The programs in [`benches/peers`](../benches/peers/README.md) are built first, which needs Rust \
         1.89, Go, Maven with Java 17, Node and Python, and the network for their packages. A language without \
         its toolchain is left out with a notice.\n\n`REDLATCH_SERVER` chooses the server's binary. \
         [`redlatch bench`](cli.md) measures a server of your own.",
    )?;
    Ok(page.trim_end().to_owned() + "\n")
}

fn turns_of<'a>(peers: &'a Peers, subject: &Subject, clients: usize) -> Option<&'a TurnsRow> {
    peers.turns.iter().find(|row| row.subject == *subject && row.clients == clients)
}

fn turns_table(page: &mut String, peers: &Peers) -> Outcome<()> {
    write!(page, "| turns/s, clients:")?;
    CLIENTS.iter().try_for_each(|clients| write!(page, " | {clients}"))?;
    CLIENTS.iter().try_for_each(|clients| write!(page, " | x best peer, {clients}"))?;
    CLIENTS.iter().try_for_each(|clients| write!(page, " | fewest/most, {clients}"))?;
    writeln!(page, " |\n|---|{}", "---:|".repeat(3 * CLIENTS.len()))?;
    for subject in subjects(peers.turns.iter().map(|row| &row.subject)) {
        let cell = |text: &dyn Fn(&TurnsRow) -> String| {
            CLIENTS.map(|clients| or_dash(turns_of(peers, subject, clients).map(text))).join(" | ")
        };
        let rates = cell(&|row| match row.poll_ms {
            Some(poll) => format!("{} ({poll})", thousands(row.turns_per_second)),
            None => thousands(row.turns_per_second),
        });
        let ratios = cell(&|row| format!("{:.2}", row.to_best_peer));
        let fairness = cell(&|row| format!("{:.2}", row.fairness()));
        let title = bold(subject.title(), subject.is_ours());
        writeln!(page, "| {title} | {rates} | {ratios} | {fairness} |")?;
    }
    Ok(writeln!(page)?)
}

fn topologies(page: &mut String, report: &Report) -> Outcome<()> {
    writeln!(page, "## Quorum, cluster and processes\n")?;
    paragraph(page, TOPOLOGIES)?;
    writeln!(page, "| topology | library | tasks | pairs/s | server | client |")?;
    writeln!(page, "|---|---|---:|---:|---:|---:|")?;
    for row in &report.topologies.rows {
        let (rate, library) = (thousands(row.pairs_per_second), bold(row.library.to_owned(), row.is_ours()));
        let (topology, tasks) = (row.topology, row.tasks);
        let (server, client) = (row.server_us, row.client_us);
        writeln!(page, "| {topology} | {library} | {tasks} | {rate} | {server:.1} | {client:.1} |")?;
    }
    writeln!(page)?;
    report.topologies.processes.write(page)?;
    beside_rslock::write(&report.topologies.beside_rslock, page)
}

fn shard(page: &mut String, report: &Report) -> Outcome<()> {
    paragraph(page, SHARD)?;
    writeln!(page, "| lock | server time a pair | computed: pairs/s of a whole core | at 70 % of a core |")?;
    writeln!(page, "|---|---:|---:|---:|")?;
    let ours = |kind| !matches!(kind, Kind::Pair(work) if !work.is_ours());
    for row in report.server_cpu.iter().filter(|row| ours(row.kind)) {
        let rate = 1e6 / row.server_us;
        let (title, us) = (row.kind.title(), row.server_us);
        writeln!(page, "| {title} | {us:.1} us | {} | {} |", thousands(rate), thousands(0.7 * rate))?;
    }
    writeln!(page)?;
    if let Some(row) = &report.renewal {
        // With the default TTL, a lock is renewed every 10 s.
        let part = row.server_us_per_renewal * 1e5 / 1e6;
        paragraph(
            page,
            &format!(
                "Held locks cost memory and renewals. Measured with {} locks and a TTL of {} ms: {:.0} bytes of \
                 the server's memory a lock, and {:.1} us of its CPU time a renewal. Computed for a million held \
                 locks with the default TTL of 30 s, each renewed every 10 s: {:.2} GB, 100,000 renewals a \
                 second, and {:.0} % of a core.\n\n\
                 A released lock leaves its counter for `token_ttl`, an hour: half of that memory, as the table \
                 above has it. A service that locks 1,000 new names a second fills 0.6 GB.",
                row.locks,
                row.ttl_ms,
                row.bytes_per_lock,
                row.server_us_per_renewal,
                row.bytes_per_lock * 1e6 / 1e9,
                part * 100.0,
            ),
        )?;
    }
    paragraph(
        page,
        "Computed, not measured: names are spread over the shards of a cluster, so k shards carry k times \
         these rates if no single name dominates. All names of a shard share its rate, also that of \
         hand-overs, and one name is on one shard. On a quorum, every node serves every pair, so more nodes do not raise the rate.",
    )
}

fn targets(page: &mut String, report: &Report) -> Outcome<()> {
    writeln!(page, "## Targets\n")?;
    paragraph(
        page,
        "The limits that this project sets itself, and what this run measured. The *baseline* is `SET NX PX` with a \
         script that compares and deletes, or two bare scripts for one task. *Server apart*: pinned to a core of \
         its own; *server one core*: server and client share one; *shared cores*: both use both.",
    )?;
    writeln!(page, "| limit | measured | |\n|---|---:|---|")?;
    for target in &report.targets {
        let verdict = if target.met { "met" } else { "**missed**" };
        writeln!(page, "| {} | {:.2} | {verdict} |", target.limit, target.measured)?;
    }
    Ok(())
}

/// Kinds that differ little from another one are only in the tables.
fn is_plotted(subject: &Subject) -> bool {
    subject.kind != "unfenced"
        && subject.is_exclusive()
        && !(subject.is_ours() && subject.kind == "reentrant")
}

fn series<'a>(
    all: impl Iterator<Item = &'a Subject>,
    values: impl Fn(&Subject) -> Vec<Option<f64>>,
) -> Vec<Series> {
    let subjects = subjects(all.filter(|subject| is_plotted(subject)));
    let series = subjects.into_iter().map(|subject| Series {
        label: subject.title(),
        is_ours: subject.is_ours(),
        values: values(subject),
    });
    series.collect()
}

fn pairs_plot(peers: &Peers) -> String {
    let series = series(peers.pairs.iter().map(|row| &row.subject), |subject| {
        TASKS.map(|tasks| pairs_of(&peers.pairs, subject, tasks).map(|row| row.pairs_per_second)).to_vec()
    });
    plot::lines("Acquire and release: pairs a second", ("tasks of one client", &TASKS), &series, false)
}

fn turns_plot(peers: &Peers) -> String {
    let series = series(peers.turns.iter().map(|row| &row.subject), |subject| {
        CLIENTS.map(|clients| turns_of(peers, subject, clients).map(|row| row.turns_per_second)).to_vec()
    });
    let title = "One contended lock: turns a second (logarithmic)";
    plot::lines(title, ("clients that contend for one lock", &CLIENTS), &series, true)
}

fn server_plot(peers: &Peers) -> String {
    let rows = peers.pairs.iter().filter(|row| row.tasks == 256 && row.subject.is_exclusive());
    let mut bars: Vec<Bar> = rows
        .map(|row| Bar { label: row.subject.title(), is_ours: row.subject.is_ours(), value: row.server_us })
        .collect();
    bars.sort_by(|one, other| one.value.total_cmp(&other.value));
    plot::bars("CPU time of the server for one pair, 256 tasks, in microseconds", &bars)
}
