//! Mistakes in the turns of clients that the judge must find.

use super::table::LINGERING;
use super::{Edit, Mutant, Setting};
use crate::support::Topology::Standalone;

/// For mistakes that show while tasks of several clients compete and nothing disturbs them: faults
/// of one class leave more of a run without one, and few holds outlast a turn.
const COMPETING: Setting =
    Setting { topology: Standalone, seconds: 60, linger: 1_000, sets: 1_000, faults: &["script-flush"] };

/// Nothing ends a turn when its time is over,
const NO_TIMER: Edit =
    Edit { file: "src/lease/cohort.rs", from: "for_each(|cohort| cohort.end());", to: "for_each(drop);" };

/// and no task that releases the lock sees that.
const NO_TIME: Edit = Edit {
    file: "src/lease/cohort.rs",
    from: "!self.is_ended.load(Ordering::Relaxed) && Moment::now() < self.until\n",
    to: "true\n",
};

pub const TURN_RUNS: &[Mutant] = &[
    Mutant {
        name: "turn-of-a-writer-lasts-long",
        edits: &[Edit {
            file: "src/lease/owned_lease.rs",
            from: "let until = now + turn.min(deadline.since(now) / 4);",
            to: "let is_write = self.guard.attempt.kind.name == \"write\";
        let until = now + if is_write { turn * 40 } else { turn.min(deadline.since(now) / 4) };",
        }],
        setting: COMPETING,
        rules: &["turn"],
    },
    Mutant { name: "turn-without-an-end", edits: &[NO_TIMER, NO_TIME], setting: LINGERING, rules: &["turn"] },
    // The same, and there is no end of the tokens that a turn has.
    Mutant {
        name: "client-passes-a-lock-on-for-ever",
        edits: &[
            NO_TIMER,
            NO_TIME,
            Edit { file: "src/lease/attempt.rs", from: "self.spare_tokens() > 0", to: "true" },
        ],
        setting: COMPETING,
        rules: &["bounded wait"],
    },
    Mutant {
        name: "poll-loses-the-place-in-the-queue",
        edits: &[Edit {
            file: "lua/mutex.lua",
            from: "  local is_added = not is_queued and redis.call('ZADD', queue, 'NX', place or call.now, waiter) == 1\n",
            to: "  local is_added = redis.call('ZADD', queue, call.now, waiter) == 1\n",
        }],
        setting: COMPETING,
        rules: &["bounded wait"],
    },
    Mutant {
        name: "passed-hold-has-two-receivers",
        edits: &[
            Edit {
                file: "src/lease/local_queue.rs",
                from: "local_queue.passed.take()",
                to: "local_queue.passed.clone()",
            },
            Edit {
                file: "src/lease/cohort.rs",
                from: "            CohortState::Passed(hold) => {\n                if self.has_time() {\n                    *state = CohortState::Held(front);\n",
                to: "            CohortState::Passed(mut hold) => {\n                if self.has_time() {\n                    let call = OpenCall::new(hold.call.keeper(), &hold.guard.attempt.name);\n                    let (guard, until) = (hold.guard.hand_over(), hold.until);\n                    *state = CohortState::Passed(Box::new(PassedHold { guard, until, call }));\n                    drop(state);\n                    drop(front);\n",
            },
        ],
        setting: COMPETING,
        rules: &["exclusion"],
    },
];
