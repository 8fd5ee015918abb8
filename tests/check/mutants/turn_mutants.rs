//! Mistakes in passing a hold on inside a client.

use super::client_test_mutants::edit;
use super::{Edit, TestMutant};

const PASSED: &str = "suite::mutex_standalone_push_resp2::tasks_pass_a_hold_on_without_a_request";

pub const TURN_MUTANTS: &[TestMutant] = &[
    TestMutant {
        name: "token-reused",
        edits: &[edit("src/lease/attempt.rs", "self.token(last + 1)", "self.token(last)")],
        test: PASSED,
    },
    TestMutant {
        name: "tokens-not-reserved",
        edits: &[edit(
            "src/lease/verbs.rs",
            "self.capacity().or_else(|| self.reserved_tokens())",
            "self.capacity()",
        )],
        test: PASSED,
    },
    TestMutant {
        name: "unused-tokens-kept",
        edits: &[edit(
            "src/lease/verbs.rs",
            "self.call(self.kind.verbs.release).own(self.last_token());",
            "self.call(self.kind.verbs.release).own(Word::Default);",
        )],
        test: PASSED,
    },
    TestMutant {
        name: "hold-of-an-owner-passed",
        edits: &[edit(
            "src/lease/lock_request.rs",
            "Renewal::Automatic if self.owner.is_none() => ",
            "Renewal::Automatic => ",
        )],
        test: "suite::reentrant_standalone_poll_resp3::holders_exclude_each_other_and_tokens_grow",
    },
    TestMutant {
        name: "passed-after-the-turn",
        edits: &[
            edit(
                "src/lease/cohort.rs",
                "                    cohort.end();\n",
                "                    drop(cohort);\n",
            ),
            edit("src/lease/cohort.rs", "        Moment::now() < self.until\n", "        true\n"),
            edit("src/lease/attempt.rs", "self.reserved.passes_left.load(Ordering::Relaxed) > 0", "true"),
        ],
        test: "suite::mutex_standalone_push_resp2::other_clients_have_their_turn",
    },
    TestMutant {
        name: "hold-without-a-receiver-kept",
        edits: &[edit(
            "src/lease/cohort.rs",
            "                    cohort.end();\n",
            "                    drop(cohort);\n",
        )],
        test: "suite::mutex_standalone_push_resp2::a_passed_hold_without_a_receiver_is_released",
    },
    TestMutant {
        name: "passed-to-other-options",
        edits: &[edit(
            "src/lease/cohort.rs",
            "if !request.is_for(&hold.guard.attempt) =>",
            "if false && !request.is_for(&hold.guard.attempt) =>",
        )],
        test: "suite::mutex_standalone_push_resp2::a_hold_is_not_passed_to_a_call_with_other_options",
    },
    TestMutant {
        name: "place-of-a-passed-hold-lost",
        edits: &[edit(
            "src/lease/local_queue.rs",
            "        self.with_queue(|local_queue| local_queue.passed.take())\n",
            "        None\n",
        )],
        test: PASSED,
    },
    TestMutant {
        name: "lease-that-was-passed-on-held",
        edits: &[edit("src/queries.rs", "        !self.is_passed && self.of", "        self.of")],
        test: "suite::mutex_standalone_push_resp2::a_lease_that_was_passed_on_is_not_held",
    },
];
