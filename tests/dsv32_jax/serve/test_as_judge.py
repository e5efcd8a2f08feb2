from train.rl.judge import Judge, JudgeConfig
from train.rl.tasks import Task


def test_a_checkpoint_behind_the_server_can_be_a_judge(server, tmp_path):
    cfg = JudgeConfig(
        base_url=f"http://127.0.0.1:{server.port}/v1", model="tiny", max_tokens=40, give_up_s=20.0
    )
    judge = Judge(cfg, tmp_path / "judge.sqlite")
    task = Task(name="t", domain="d", question="script=grade", rubric="Is it short?")

    assert judge.score(task, "ok") == 0.8
    assert judge.spent > 500  # the prompt's tokens are bytes here
    judge.close()
