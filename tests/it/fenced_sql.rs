//! The SQL of docs/fencing.md, on SQLite: the module `sqlite3` of Python runs it, so that no test
//! has to build a database.

use std::process::Command;

/// Runs the page's statements with growing, equal and late tokens, in one table and in a
/// transaction that the table of tokens decides.
const PROGRAM: &str = r#"
import re, sqlite3, sys
page = open(sys.argv[1]).read()
things, write, fences, begin = re.findall(r"```sql\n(.*?)```", page, re.S)
print("SQLite", sqlite3.sqlite_version)
db = sqlite3.connect(":memory:", isolation_level=None)
db.execute(things)
db.execute(fences)

def put(token, value):
    changed = db.execute(write, {"id": "report", "value": value, "token": token}).rowcount
    return changed == 1
def value():
    return db.execute("SELECT value, token FROM things WHERE id = 'report'").fetchone()

assert put(7, "first") and put(7, "first, again"), "the first token, and an equal one"
assert put(8, "second"), "a larger one"
assert not put(7, "late") and value() == ("second", 8), "a smaller one changes no row"
large = 2**53 - 1
assert put(large, "large") and not put(large - 1, "late"), "the largest token is compared exactly"

def move(token, amount):
    db.execute("BEGIN IMMEDIATE")
    if db.execute(begin, {"name": "accounts", "token": token}).rowcount != 1:
        db.execute("ROLLBACK")
        return False
    db.execute("UPDATE accounts SET balance = balance - ? WHERE id = 1", [amount])
    db.execute("UPDATE accounts SET balance = balance + ? WHERE id = 2", [amount])
    db.execute("COMMIT")
    return True

db.execute("CREATE TABLE accounts (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL)")
db.execute("INSERT INTO accounts VALUES (1, 100), (2, 0)")
assert move(7, 10) and move(8, 10) and move(8, 10)
assert not move(7, 10), "a late transaction is rolled back"
assert db.execute("SELECT balance FROM accounts ORDER BY id").fetchall() == [(70,), (30,)]
"#;

#[test]
fn statements_of_the_page_refuse_late_writes_on_sqlite() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/fencing.md");
    let run = Command::new("python3").args(["-c", PROGRAM, page]).output();
    let run = run.expect("this test runs SQLite through python3, which is not on the PATH");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}
