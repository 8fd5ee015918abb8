//! Mistakes in passing a hold on, or sharing it, inside a client.

use super::TestMutant;
use super::client_test_mutants::edit;

const PASSED: &str = "suite::mutex_standalone_push_resp2::tasks_pass_a_hold_on_without_a_request";

pub const TURN_MUTANTS: &[TestMutant] = &[
    TestMutant {
        name: "token-reused",
        edits: &[edit("src/lease/attempt.rs", "self.token(last + 1)", "self.token(last)")],
        test: PASSED,
    },
    TestMutant {
        name: "tokens-not-reserved",
        edits: &[edit("src/lease/verbs.rs", "None => self.reserved_tokens(),", "None => None,")],
        test: PASSED,
    },
    TestMutant {
        name: "unused-tokens-kept",
        edits: &[edit(
            "src/lease/verbs.rs",
            "self.call(self.kind.verbs.release).own(self.last_used());",
            "self.call(self.kind.verbs.release).own(Word::Default);",
        )],
        test: PASSED,
    },
    TestMutant {
        name: "tokens-of-a-dropped-call-kept",
        edits: &[edit(
            "src/lease/verbs.rs",
            "self.call(self.kind.verbs.release).own(self.last_used());",
            "self.call(self.kind.verbs.release).own(self.last_token());",
        )],
        test: "standalone::reserved_tokens::dropped_waiters_give_back_what_their_grants_reserved",
    },
    TestMutant {
        name: "hold-of-an-owner-passed",
        edits: &[edit(
            "src/lease/lock_request.rs",
            "Renewal::Automatic if owner.is_none() && ",
            "Renewal::Automatic if ",
        )],
        test: "suite::reentrant_standalone_poll_resp3::holders_exclude_each_other_and_tokens_grow",
    },
    TestMutant {
        name: "passed-after-the-turn",
        edits: &[
            edit("src/lease/cohort.rs", "for_each(|cohort| cohort.end());", "for_each(drop);"),
            edit(
                "src/lease/cohort.rs",
                "!self.is_ended.load(Ordering::Relaxed) && Moment::now() < self.until\n",
                "true\n",
            ),
            edit("src/lease/attempt.rs", "self.spare_tokens() > 0", "true"),
        ],
        test: "suite::mutex_standalone_push_resp2::other_clients_have_their_turn",
    },
    TestMutant {
        name: "passed-after-a-loss",
        edits: &[edit(
            "src/lease/owned_lease.rs",
            "if end != LeaseEnd::Released || self.lease.is_renewing() {\n",
            "if false {\n",
        )],
        test: "suite::mutex_standalone_push_resp2::a_lost_hold_is_not_passed_on",
    },
    TestMutant {
        name: "hold-without-a-receiver-kept",
        edits: &[edit("src/lease/cohort.rs", "for_each(|cohort| cohort.end());", "for_each(drop);")],
        test: "suite::mutex_standalone_push_resp2::a_passed_hold_without_a_receiver_is_released",
    },
    TestMutant {
        name: "passed-to-other-options",
        edits: &[edit(
            "src/lease/cohort.rs",
            "if !request.is_for(&hold.guard.attempt)\n                    || ",
            "if ",
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
    TestMutant {
        name: "joined-after-the-turn",
        edits: &[edit(
            "src/lease/joint_hold.rs",
            "let is_in_time = Moment::now() < group.until\n            && ",
            "let is_in_time = ",
        )],
        test: "suite::read_standalone_push_resp2::a_reader_that_comes_late_has_a_hold_of_its_own",
    },
    TestMutant {
        name: "joint-hold-released-while-a-task-reads",
        edits: &[edit(
            "src/lease/joint_hold.rs",
            "state.expects_waiters || !state.members.is_empty()",
            "state.expects_waiters",
        )],
        test: "suite::read_standalone_push_resp2::tasks_read_under_one_hold_without_a_request",
    },
    TestMutant {
        name: "joint-hold-kept-for-a-task-that-is-not-polled",
        edits: &[edit(
            "src/lease/joint_hold.rs",
            "sleep(group.until.since(Moment::now())).await;",
            "std::future::pending::<()>().await;",
        )],
        test: "suite::read_standalone_push_resp2::a_task_that_is_not_polled_keeps_no_hold",
    },
    TestMutant {
        name: "joint-hold-lingers-after-its-readers",
        edits: &[edit(
            "src/lease/joint_hold.rs",
            "        state.expects_waiters = false;\n        if let",
            "        if true {\n            return;\n        }\n        if let",
        )],
        test: "suite::read_standalone_push_resp2::a_hold_that_is_kept_for_a_task_ends_once_that_leaves",
    },
    TestMutant {
        name: "last-reader-waits-for-no-reply",
        edits: &[edit(
            "src/lease/joint_hold.rs",
            "            let _in_time = client.with_runtime(released).await;\n",
            "            drop(released);\n",
        )],
        test: "standalone::dropped_guards::the_last_reader_waits_for_the_release_of_a_dropped_guard",
    },
    TestMutant {
        name: "joint-hold-waits-for-other-options",
        edits: &[edit(
            "src/lease/joint_hold.rs",
            "            request.client.joint_queues.end_turn(&request.name);\n",
            "",
        )],
        test: "suite::read_standalone_push_resp2::a_task_with_other_options_keeps_no_hold",
    },
    TestMutant {
        name: "reader-joins-a-leaked-hold",
        edits: &[edit(
            "src/lease/joint_hold.rs",
            "state.hold.is_none() || group.lease.is_leaked() || state.has_ended {",
            "state.hold.is_none() || state.has_ended {",
        )],
        test: "suite::read_standalone_push_resp2::a_leaked_read_stays_until_its_ttl",
    },
    TestMutant {
        name: "close-leaves-a-passed-hold",
        edits: &[edit("src/lease/client.rs", "        self.local_queues.end_turns();\n", "")],
        test: "suite::mutex_standalone_push_resp2::a_close_releases_a_hold_that_no_task_receives",
    },
    TestMutant {
        name: "last-token-is-forgotten-with-its-queue",
        edits: &[edit(
            "src/lease/local_queue.rs",
            "        *last_token = token.max(*last_token);\n",
            "        *last_token = 0;\n",
        )],
        test: "standalone::reserved_tokens::no_token_is_reserved_while_the_counter_is_ahead_of_the_clock",
    },
    TestMutant {
        name: "joint-hold-of-an-owner",
        edits: &[edit(
            "src/lease/acquire.rs",
            "    if !request.shares() {\n        return Hold::enter(request);\n    }\n",
            "",
        )],
        test: "suite::read_standalone_push_resp2::readers_share_only_what_they_may",
    },
    TestMutant {
        name: "loss-of-a-joint-hold-called-a-release",
        edits: &[edit(
            "src/lease/lease.rs",
            "Some(hold) => hold.end().map(decided),",
            "Some(hold) => hold.end().map(|_| LeaseEnd::Released),",
        )],
        test: "suite::read_standalone_push_resp2::a_revoked_hold_is_lost_for_all_its_readers",
    },
    TestMutant {
        name: "leaked-part-released",
        edits: &[edit(
            "src/lease/joint_hold.rs",
            "        if self.lease.is_leaked() {\n            hold.leak();",
            "        if false {\n            hold.leak();",
        )],
        test: "suite::read_standalone_push_resp2::a_leaked_read_stays_until_its_ttl",
    },
    TestMutant {
        name: "leaked-part-released-by-a-close",
        edits: &[edit("src/lease/keeper.rs", "if lease.is_leaked() {", "if false {")],
        test: "suite::read_standalone_push_resp2::a_leaked_read_stays_until_its_ttl",
    },
    TestMutant {
        name: "revoked-joint-hold-joined",
        edits: &[edit(
            "src/lease/joint_hold.rs",
            "state.hold.is_none() || group.lease.is_leaked() || state.has_ended",
            "state.hold.is_none() || group.lease.is_leaked()",
        )],
        test: "suite::read_standalone_push_resp2::a_revoked_hold_is_lost_for_all_its_readers",
    },
    TestMutant {
        name: "only-one-of-those-that-wait-admitted",
        edits: &[edit(
            "src/lease/local_queue.rs",
            "places.add_permits(behind)",
            "places.add_permits(behind.min(0))",
        )],
        test: "suite::read_standalone_push_resp2::one_task_asks_for_all_that_wait",
    },
    TestMutant {
        name: "tasks-that-read-let-no-others-run",
        edits: &[edit("src/lease/joint_hold.rs", "BUDGET_OF_A_READ: u32 = 4;", "BUDGET_OF_A_READ: u32 = 1;")],
        test: "rwlock::many_readers::rwlock_standalone_tasks_that_only_read_let_others_run",
    },
    TestMutant {
        name: "late-reader-waits-behind-newer-ones",
        edits: &[edit(
            "src/lease/joint_hold.rs",
            "if was_late || !front.is_one_of_several() {",
            "if was_late & false || !front.is_one_of_several() {",
        )],
        test: "suite::read_standalone_push_resp2::a_reader_that_is_late_twice_asks_for_itself",
    },
    TestMutant {
        name: "earlier-turn-of-readers-lasts",
        edits: &[edit(
            "src/lease/local_queue.rs",
            ".into_iter().for_each(|earlier| earlier.end());",
            ".into_iter().for_each(drop);",
        )],
        test: "suite::read_standalone_push_resp2::a_turn_of_readers_ends_when_another_begins",
    },
    TestMutant {
        name: "passed-hold-is-not-settled",
        edits: &[edit(
            "src/lease/client.rs",
            ".into_iter().for_each(LocalQueues::end_turns);",
            ".into_iter().for_each(drop);",
        )],
        test: "suite::mutex_standalone_push_resp2::a_passed_hold_is_released_before_all_is_settled",
    },
    TestMutant {
        name: "nested-grant-shows-no-loss",
        edits: &[edit(
            "src/lease/schedule.rs",
            "siblings.any(|sibling| sibling.fencing_token() != lease.fencing_token())",
            "siblings.any(|sibling| sibling.fencing_token() != sibling.fencing_token())",
        )],
        test: "suite::reentrant_standalone_push_resp2::nested_grant_shows_the_loss_of_the_outer_hold",
    },
];
